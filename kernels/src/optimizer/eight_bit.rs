//! The AdamW update with state of 8 bits an element, in blocks with a scale each.

use super::adamw::{AdamWFactors, AdamWStep};
use super::dynamic_map::DynamicMap;
use crate::simd::{Kernel, dispatch};

/// The number of consecutive elements that share a scale. The last block of a slice may have fewer.
pub const EIGHT_BIT_BLOCK: usize = 256;

/// State in 8 bits an element: element `i` is the number of its code in the map, times `scales[i /
/// 256]`.
///
/// Memory that is filled with zeros is a state of zeros, since all scales are 0.
#[derive(Debug)]
pub struct EightBit<'a> {
    /// Codes, `[elements]`.
    pub codes: &'a mut [u8],
    /// The largest magnitude of each block, `[elements / 256, rounded up]`.
    pub scales: &'a mut [f32],
}

/// The numbers for which codes stand, from -1 or 0 to 1: dynamic quantization.
///
/// Codes are in the order of their numbers. Numbers are close to each other near zero, and a number
/// in [0.1, 1) is kept more exactly than one in [0.01, 0.1), and so on for seven powers of ten.
///
/// Source: Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv 2110.02861,
/// sections 2.1 and 2.2. The numbers are those of `create_dynamic_map(signed, max_exponent_bits=7,
/// total_bits=8)` of its implementation bitsandbytes, except for their last bit: each is computed
/// in f64 and rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EightBitMap {
    /// Numbers of both signs, for a first moment: 0 has code 127, and 1 has code 255. The least is
    /// about -0.993, with code 0.
    Signed,
    /// Numbers from 0, for a second moment: 0 has code 0, and 1 has code 255.
    Unsigned,
}

impl EightBitMap {
    /// The numbers of the codes 0 to 255, in ascending order.
    #[must_use]
    pub fn numbers(self) -> &'static [f32; 256] {
        &self.map().numbers
    }

    fn map(self) -> &'static DynamicMap {
        match self {
            Self::Signed => DynamicMap::signed(),
            Self::Unsigned => DynamicMap::unsigned(),
        }
    }
}

/// Makes one AdamW update of a slice with 8-bit state: the first moment by the signed map, and the
/// second by the unsigned map. The slices begin where a block begins.
///
/// For each block: both moments are decoded, the update is that of [`adamw`](super::adamw()), and
/// the new moments are encoded as [`encode_8bit`] does. The update itself uses the new moments
/// before they are rounded. A second moment above 0 never gets the code of 0, but at least code 1,
/// about 3.3e-7 of the largest in its block: 0 would leave `epsilon` alone in the denominator of an
/// element whose first moment is not 0 and whose next gradient is (Li et al., "Memory efficient
/// optimizers with 4-bit states", arXiv 2309.01507, section 4.1, the zero-point problem).
///
/// # Panics
///
/// If there are not as many gradients and codes as parameters, and a scale for each block; or if
/// `step.step` is 0.
pub fn adamw_8bit(
    step: &AdamWStep,
    parameter: &mut [f32],
    gradient: &[f32],
    [first, second]: [EightBit<'_>; 2],
) {
    assert_eq!(gradient.len(), parameter.len(), "adamw_8bit: lengths of gradient and parameter");
    first.check("adamw_8bit", parameter.len());
    second.check("adamw_8bit", parameter.len());
    let maps = [DynamicMap::signed(), DynamicMap::unsigned()];
    let factors = AdamWFactors::of(step);
    dispatch(AdamW8Bit { factors, maps, parameter, gradient, state: [first, second] });
}

/// Decodes state: `target[i] = number(codes[i]) * scales[i / 256]`, in f32. The codes begin where a
/// block begins.
///
/// # Panics
///
/// If there are not as many codes as elements in `target`, and a scale for each block.
pub fn decode_8bit(map: EightBitMap, target: &mut [f32], codes: &[u8], scales: &[f32]) {
    check("decode_8bit", target.len(), codes.len(), scales.len());
    let codes = codes.chunks(EIGHT_BIT_BLOCK);
    for ((target, codes), scale) in target.chunks_mut(EIGHT_BIT_BLOCK).zip(codes).zip(scales) {
        decode(map.map(), target, codes, *scale);
    }
}

/// Encodes state. A block's scale is its largest magnitude, and a code is that of the number
/// nearest to `value / scale` (an f32); of two that are equally near, the lower code. A block with
/// an element that is infinite or NaN decodes to elements that are not finite.
///
/// # Panics
///
/// If there are not as many codes as values, and a scale for each block.
pub fn encode_8bit(map: EightBitMap, values: &[f32], target: EightBit<'_>) {
    target.check("encode_8bit", values.len());
    dispatch(Encode { map: map.map(), values, target });
}

impl EightBit<'_> {
    fn check(&self, operation: &str, len: usize) {
        check(operation, len, self.codes.len(), self.scales.len());
    }
}

fn check(operation: &str, len: usize, codes: usize, scales: usize) {
    assert_eq!(codes, len, "{operation}: the number of codes for {len} elements");
    let blocks = len.div_ceil(EIGHT_BIT_BLOCK);
    assert_eq!(scales, blocks, "{operation}: the number of scales for {len} elements");
}

#[inline(always)]
fn decode(map: &DynamicMap, target: &mut [f32], codes: &[u8], scale: f32) {
    for (target, &code) in target.iter_mut().zip(codes) {
        *target = map.numbers[usize::from(code)] * scale;
    }
}

#[inline(always)]
fn encode(map: &DynamicMap, values: &[f32], codes: &mut [u8], scale: &mut f32) {
    *scale = largest_magnitude(values);
    // A block of zeros gets the code of 0.
    let divisor = if *scale == 0.0 { 1.0 } else { *scale };
    let mut quotients = [0.0; EIGHT_BIT_BLOCK];
    for (quotient, &value) in quotients.iter_mut().zip(values) {
        *quotient = value / divisor;
    }
    for (code, &quotient) in codes.iter_mut().zip(&quotients) {
        *code = map.code(quotient);
    }
}

/// The largest magnitude; NaN if a value is NaN.
#[inline(always)]
fn largest_magnitude(values: &[f32]) -> f32 {
    // The bits of magnitudes are in the order of the magnitudes, NaN above infinity.
    let magnitudes = values.iter().map(|value| value.abs().to_bits());
    f32::from_bits(magnitudes.fold(0, u32::max))
}

struct Encode<'a> {
    map: &'static DynamicMap,
    values: &'a [f32],
    target: EightBit<'a>,
}

impl Kernel for Encode<'_> {
    #[inline(always)]
    fn run(self) {
        let blocks = self.values.chunks(EIGHT_BIT_BLOCK).zip(self.target.scales);
        for ((values, scale), codes) in blocks.zip(self.target.codes.chunks_mut(EIGHT_BIT_BLOCK)) {
            encode(self.map, values, codes, scale);
        }
    }
}

struct AdamW8Bit<'a> {
    factors: AdamWFactors,
    maps: [&'static DynamicMap; 2],
    parameter: &'a mut [f32],
    gradient: &'a [f32],
    state: [EightBit<'a>; 2],
}

impl AdamW8Bit<'_> {
    /// The codes and the scale of each moment in the block that begins at `start`.
    #[inline(always)]
    fn state_at(&mut self, start: usize) -> [(&mut [u8], &mut f32); 2] {
        let end = self.parameter.len().min(start + EIGHT_BIT_BLOCK);
        let state = self.state.each_mut();
        state.map(|it| (&mut it.codes[start..end], &mut it.scales[start / EIGHT_BIT_BLOCK]))
    }

    #[inline(always)]
    fn update_block(&mut self, start: usize) {
        let maps = self.maps;
        let factors = self.factors;
        let mut moments = [[0.0; EIGHT_BIT_BLOCK]; 2];
        for ((codes, scale), (map, moment)) in
            self.state_at(start).into_iter().zip(maps.iter().zip(&mut moments))
        {
            decode(map, moment, codes, *scale);
        }
        let [first, second] = &mut moments;
        let parameters = self.parameter[start..].iter_mut().zip(&self.gradient[start..]);
        for ((parameter, &gradient), moments) in parameters.zip(first.iter_mut().zip(second)) {
            factors.update(parameter, gradient, moments.0, moments.1);
        }
        let [first, second] = &moments;
        let [(first_codes, first_scale), (codes, scale)] = self.state_at(start);
        encode(maps[0], &first[..codes.len()], first_codes, first_scale);
        encode(maps[1], &second[..codes.len()], codes, scale);
        for (code, value) in codes.iter_mut().zip(second) {
            *code = (*code).max(u8::from(*value > 0.0));
        }
    }
}

impl Kernel for AdamW8Bit<'_> {
    #[inline(always)]
    fn run(mut self) {
        for start in (0..self.parameter.len()).step_by(EIGHT_BIT_BLOCK) {
            self.update_block(start);
        }
    }
}

#[cfg(test)]
mod tests;
