//! Rounding of one float to a narrower type without branches, so that loops over elements
//! vectorize.
//!
//! The bits are those of `half`, NaN included. The tests go through every 16-bit float, every
//! midpoint and their neighbors.

/// All bits of an f32 except its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// The bits of infinity; greater magnitudes are NaN.
const INFINITY: u32 = 0x7f80_0000;
/// The bit that makes a NaN quiet.
const QUIET: u32 = 0x0040_0000;

/// The fraction bits of an f32 that f16 lacks.
const F16_DROPPED: u32 = (1 << 13) - 1;
/// 2^-14, the least normal f16, as bits of an f32.
const F16_LEAST_NORMAL: u32 = 0x3880_0000;
/// The exponent bias of f32 minus that of f16, as bits of an f32.
const F16_REBIAS: u32 = (127 - 15) << 23;
/// 2^16, the least power of two that f16 cannot represent, as bits of an f32.
const F16_LIMIT: u32 = 0x4780_0000;

/// The f32 nearest to `value`, ties to even.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the function rounds to f32")]
pub(crate) fn nearest_f32(value: f64) -> f32 {
    value as f32
}

/// `value` rounded to the nearest f16, ties to even, as f32.
#[inline(always)]
pub(crate) fn round_f16(value: f32) -> f32 {
    let bits = value.to_bits();
    let magnitude = bits & MAGNITUDE;

    // Adding just under half of the last place kept carries exactly when rounding goes up; one more
    // if it is odd.
    let odd = (magnitude >> 13) & 1;
    let carried = magnitude.wrapping_add(odd + (F16_DROPPED >> 1)) & !F16_DROPPED;
    let normal = if carried >= F16_LIMIT { INFINITY } else { carried };
    // Below the normal f16, the last place is 2^-24 everywhere: that of an f32 in [0.5, 1), so the
    // addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5 - 0.5).to_bits();
    let number = if magnitude < F16_LEAST_NORMAL { subnormal } else { normal };

    let nan = (magnitude & !F16_DROPPED) | QUIET;
    let rounded = if magnitude > INFINITY { nan } else { number };
    f32::from_bits(rounded | (bits & !MAGNITUDE))
}

/// `value` rounded to the nearest bf16, ties to even, as f32.
#[inline(always)]
pub(crate) fn round_bf16(value: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16_bits(value)) << 16)
}

/// The bits of the bf16 nearest to `value`, ties to even.
#[inline(always)]
pub(crate) fn to_bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let odd = (bits >> 16) & 1;
    let carried = bits.wrapping_add(odd + 0x7fff);
    // A comparison of floats, which takes one instruction.
    let rounded = if value.is_nan() { bits | QUIET } else { carried };
    (rounded >> 16) as u16
}

/// The f32 equal to the bf16 of these bits.
#[inline(always)]
pub(crate) fn from_bf16_bits(bits: u16) -> f32 {
    let bits = u32::from(bits) << 16;
    f32::from_bits(if f32::from_bits(bits).is_nan() { bits | QUIET } else { bits })
}

/// The bits of the f16 nearest to `value`, ties to even.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "an f16 has 16 bits")]
pub(crate) fn to_f16_bits(value: f32) -> u16 {
    let rounded = round_f16(value).to_bits();
    let magnitude = rounded & MAGNITUDE;
    let normal = magnitude.wrapping_sub(F16_REBIAS) >> 13;
    // In units of 2^-24, which adding 0.5 moves to the end of the fraction.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let number = if magnitude < F16_LEAST_NORMAL { subnormal } else { normal };
    let special = (magnitude >> 13) & 0x7fff;
    let bits = if magnitude >= INFINITY { special } else { number };
    (bits | (rounded & !MAGNITUDE) >> 16) as u16
}

/// The f32 equal to the f16 of these bits.
#[inline(always)]
pub(crate) fn from_f16_bits(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let normal = magnitude + F16_REBIAS;
    // A fraction without the leading one: put one in front of it, as 2^-14, and take it away again.
    let subnormal = f32::from_bits(magnitude + F16_LEAST_NORMAL) - f32::from_bits(F16_LEAST_NORMAL);
    let number = if magnitude < 1 << 23 { subnormal.to_bits() } else { normal };
    let nan = magnitude | INFINITY | QUIET;
    let infinite = if magnitude > 0x1f << 23 { nan } else { INFINITY };
    let rounded = if magnitude >= 0x1f << 23 { infinite } else { number };
    f32::from_bits(sign | rounded)
}

#[cfg(test)]
mod tests;
