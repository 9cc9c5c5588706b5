//! The bits equal those of `half`, one element at a time.

use half::{bf16, f16};

use super::{from_bf16_bits, from_f16_bits, round_bf16, round_f16, to_bf16_bits, to_f16_bits};
use crate::tests::around_every_bf16;

/// Every 16-bit float, every midpoint of two neighbors, and the f32 next to these, of both signs.
fn decisive_values() -> impl Iterator<Item = f32> {
    let every_f16 = (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32().to_bits());
    let every_bf16 = (0..=u16::MAX).map(|bits| u32::from(bits) << 16);
    every_f16.chain(every_bf16).flat_map(|bits| {
        // The float itself, then half a last place of f16 and of bf16 above it.
        [0, 1 << 12, 1 << 15].into_iter().flat_map(move |distance| {
            let middle: u32 = bits.wrapping_add(distance);
            [middle.wrapping_sub(1), middle, middle.wrapping_add(1)].map(f32::from_bits)
        })
    })
}

/// Values from the whole range of f32, subnormals and NaN included.
fn spread_values() -> impl Iterator<Item = f32> {
    (0..=u32::MAX).step_by(8191).map(f32::from_bits)
}

#[test]
fn f32_to_f16_as_half() {
    for value in decisive_values().chain(spread_values()) {
        let expected = f16::from_f32_const(value);
        assert_eq!(to_f16_bits(value), expected.to_bits(), "{value:e} {:#x}", value.to_bits());
        let rounded = round_f16(value).to_bits();
        assert_eq!(rounded, expected.to_f32_const().to_bits(), "{value:e} {:#x}", value.to_bits());
    }
}

#[test]
fn f32_to_bf16_as_half() {
    for value in decisive_values().chain(spread_values()) {
        let expected = bf16::from_f32(value);
        assert_eq!(to_bf16_bits(value), expected.to_bits(), "{value:e} {:#x}", value.to_bits());
        let rounded = round_bf16(value).to_bits();
        assert_eq!(rounded, expected.to_f32().to_bits(), "{value:e} {:#x}", value.to_bits());
    }
}

#[test]
fn all_upper_halves_to_bf16_as_half() {
    for value in around_every_bf16().flatten() {
        let expected = bf16::from_f32(value);
        assert_eq!(to_bf16_bits(value), expected.to_bits(), "{:#x}", value.to_bits());
    }
}

#[test]
fn every_f16_to_f32_as_half() {
    for bits in 0..=u16::MAX {
        assert_eq!(from_f16_bits(bits).to_bits(), f16::from_bits(bits).to_f32_const().to_bits());
    }
}

#[test]
fn every_bf16_to_f32_as_half() {
    for bits in 0..=u16::MAX {
        assert_eq!(from_bf16_bits(bits).to_bits(), bf16::from_bits(bits).to_f32().to_bits());
    }
}
