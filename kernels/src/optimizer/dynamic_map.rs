//! The numbers of 8-bit codes, and the way from a number to its code.

use std::sync::LazyLock;

use crate::round::nearest_f32;

/// The bits of an f32 that its bucket ignores: a bucket is a bf16 with all numbers that begin with
/// its bits.
const DROPPED: u32 = 16;
/// The bits of 2^-23, in buckets. No map has a boundary between this and zero, so one bucket holds
/// all numbers up to here.
const FIRST: u32 = (127 - 23) << 7;
/// The number of buckets of each sign: up to 1, whose bucket is the last.
const BUCKETS: usize = (127 << 7) - FIRST as usize + 1;

/// A map of dynamic quantization: the numbers from -1 or 0 to 1 for which codes stand. A code is
/// found without a search: the bucket of a number says its code up to one boundary.
///
/// Source: Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv 2110.02861,
/// sections 2.1 and 2.2. The numbers are those of `create_dynamic_map(signed, max_exponent_bits=7,
/// total_bits=8)` of its implementation bitsandbytes, except for their last bit: each is computed
/// in f64 and rounded to f32 once.
#[derive(Debug)]
pub(super) struct DynamicMap {
    /// The number of each code, in ascending order.
    pub(super) numbers: [f32; 256],
    /// The largest f32 that is not above the middle of a code's number and the next one; above the
    /// last there is no boundary.
    boundaries: [f32; 256],
    /// The code of the least number of a bucket. There is at most one boundary in a bucket.
    /// Positive numbers come first.
    first_codes: [[u8; BUCKETS]; 2],
}

impl DynamicMap {
    /// Returns the map of numbers of both signs, for a first moment: 0 has code 127, and 1 has code
    /// 255. The least is about -0.993, with code 0.
    pub(super) fn signed() -> &'static Self {
        static MAP: LazyLock<DynamicMap> = LazyLock::new(|| {
            let positive = (1..128).map(|place| magnitude(place, 1));
            let negative = (1..128).rev().map(|place| -magnitude(place, 1));
            DynamicMap::of(negative.chain([0.0]).chain(positive).chain([1.0]))
        });
        &MAP
    }

    /// Returns the map of numbers from 0, for a second moment: 0 has code 0, and 1 has code 255.
    pub(super) fn unsigned() -> &'static Self {
        static MAP: LazyLock<DynamicMap> = LazyLock::new(|| {
            let numbers = (2..256).map(|place| magnitude(place, 2));
            DynamicMap::of([0.0].into_iter().chain(numbers).chain([1.0]))
        });
        &MAP
    }

    fn of(ascending: impl Iterator<Item = f64>) -> Self {
        let mut numbers = [0.0; 256];
        for (number, value) in numbers.iter_mut().zip(ascending) {
            *number = nearest_f32(value);
        }
        let mut boundaries = [f32::INFINITY; 256];
        for (boundary, pair) in boundaries.iter_mut().zip(numbers.windows(2)) {
            *boundary = rounded_down(f64::midpoint(f64::from(pair[0]), f64::from(pair[1])));
        }
        let first_codes = [0, 1].map(|sign| first_codes(&boundaries, sign));
        Self { numbers, boundaries, first_codes }
    }

    /// The code of the number nearest to `value`, which is from -1 to 1; of two that are equally
    /// near, the lower one. The code of any other value has no meaning.
    #[inline(always)]
    pub(super) fn code(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let sign = (bits >> 31) as usize;
        let magnitude = bits & 0x7fff_ffff;
        let bucket = (magnitude >> DROPPED).saturating_sub(FIRST) as usize;
        let first = self.first_codes[sign][bucket.min(BUCKETS - 1)];
        first + u8::from(value > self.boundaries[usize::from(first)])
    }
}

/// The magnitude at a place: places from `least * 2^e` to `least * 2^(e+1)` divide the numbers from
/// 10^(e-7) to 10^(e-6) into equal parts; these are their middles. `least` is a power of
/// two.
fn magnitude(place: u32, least: u32) -> f64 {
    let exponent = (place / least).ilog2();
    let parts = f64::from(least << exponent);
    let part = f64::from(place) - parts;
    let fraction = 0.1 + 0.9 * (part + 0.5) / parts;
    fraction * 10.0_f64.powi(exponent.cast_signed() - 6)
}

/// The largest f32 that is not above `value`.
fn rounded_down(value: f64) -> f32 {
    let nearest = nearest_f32(value);
    if f64::from(nearest) > value { nearest.next_down() } else { nearest }
}

/// The code of the least number of each bucket.
fn first_codes(boundaries: &[f32; 256], sign: u32) -> [u8; BUCKETS] {
    std::array::from_fn(|bucket| {
        let number = FIRST + u32::try_from(bucket).expect("a bf16 has 16 bits");
        let start = if bucket == 0 { 0 } else { number << DROPPED };
        let last = ((number + 1) << DROPPED) - 1;
        let least = if sign == 0 { f32::from_bits(start) } else { -f32::from_bits(last) };
        let below = boundaries.partition_point(|boundary| least > *boundary);
        u8::try_from(below).expect("nothing is above the last boundary")
    })
}
