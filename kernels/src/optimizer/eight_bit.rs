//! The AdamW update with state of 8 bits an element, in blocks with a scale each.

use super::adamw::{AdamWFactors, AdamWStep};
use super::dynamic_map::DynamicMap;
use crate::simd::vectorized;

/// The number of consecutive elements that share a scale. The last block of a slice may have fewer.
pub const EIGHT_BIT_BLOCK: usize = 256;

/// State in 8 bits an element: element `i` is the number of its code, times `scales[i /
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

/// Makes one AdamW update of a slice with 8-bit state. The slices begin where a block begins.
///
/// For each block: both moments are decoded, the update is that of [`adamw`](super::adamw()), and
/// the new moments are encoded. The update itself uses the new moments before they are rounded.
///
/// Codes stand for numbers from -1 (of the first moment) or 0 (of the second) to 1, by dynamic
/// quantization: numbers are close to each other near zero, and a number in [0.1, 1) is kept more
/// exactly than one in [0.01, 0.1), and so on for seven powers of ten. A block's scale is its
/// largest magnitude, and a code is that of the number nearest to `value / scale` (an f32); of two
/// that are equally near, the lower code. A block with an element that is infinite or NaN decodes
/// to elements that are not finite.
///
/// A second moment above 0 never gets the code of 0, but at least code 1, about 3.3e-7 of the
/// largest in its block: 0 would leave `epsilon` alone in the denominator of an element whose first
/// moment is not 0 and whose next gradient is (Li et al., "Memory efficient optimizers with 4-bit
/// states", arXiv 2309.01507, section 4.1, the zero-point problem).
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
    first.check(parameter.len());
    second.check(parameter.len());
    let first_map = DynamicMap::signed();
    let second_map = DynamicMap::unsigned();
    let factors = AdamWFactors::of(step);
    vectorized(
        #[inline(always)]
        move || {
            let blocks =
                parameter.chunks_mut(EIGHT_BIT_BLOCK).zip(gradient.chunks(EIGHT_BIT_BLOCK));
            let state = first.blocks().zip(second.blocks());
            for ((parameter, gradient), (first_state, second_state)) in blocks.zip(state) {
                let (first_codes, first_scale) = first_state;
                let (second_codes, second_scale) = second_state;
                let mut first = [0.0; EIGHT_BIT_BLOCK];
                let mut second = [0.0; EIGHT_BIT_BLOCK];
                decode(first_map, &mut first, first_codes, *first_scale);
                decode(second_map, &mut second, second_codes, *second_scale);
                let moments = first.iter_mut().zip(&mut second);
                let elements = parameter.iter_mut().zip(gradient).zip(moments);
                for ((parameter, &gradient), (first, second)) in elements {
                    factors.update(parameter, gradient, first, second);
                }
                encode(first_map, &first[..parameter.len()], first_codes, first_scale);
                encode(second_map, &second[..parameter.len()], second_codes, second_scale);
                for (code, value) in second_codes.iter_mut().zip(second) {
                    *code = (*code).max(u8::from(value > 0.0));
                }
            }
        },
    );
}

impl<'a> EightBit<'a> {
    /// Returns the codes and the scale of each block.
    #[inline(always)]
    fn blocks(self) -> impl Iterator<Item = (&'a mut [u8], &'a mut f32)> {
        self.codes.chunks_mut(EIGHT_BIT_BLOCK).zip(self.scales)
    }

    fn check(&self, len: usize) {
        let blocks = len.div_ceil(EIGHT_BIT_BLOCK);
        assert_eq!(self.codes.len(), len, "adamw_8bit: the number of codes for {len} elements");
        assert_eq!(
            self.scales.len(),
            blocks,
            "adamw_8bit: the number of scales for {len} elements"
        );
    }
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

#[cfg(test)]
mod tests;
