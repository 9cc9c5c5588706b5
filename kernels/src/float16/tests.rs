//! Conversions of slices equal those of single elements, on every kind of machine. `round::tests`
//! compares the latter with `half`.

use half::{bf16, f16};

use super::{narrow_bf16, narrow_f16, round_to_f16, widen_bf16, widen_f16};
use crate::simd::tests::on_all_widths;
use crate::tests::{around_every_bf16, bits};

/// Values from the whole range of f32, with tails of every length, and those around every bf16.
/// Infinities, NaN, subnormals, overflows and ties are among them.
fn sources() -> impl Iterator<Item = Vec<f32>> {
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, 65_519.9, 65_520.0, 5.96e-8, 2.9e-8, -0.0];
    let signalling = f32::from_bits(0x7f80_0001);
    let values: Vec<f32> = (0..=u32::MAX)
        .step_by(99_991)
        .map(f32::from_bits)
        .chain(special)
        .chain([signalling, -signalling])
        .collect();
    let tails = (0..19).map(move |skipped| values[skipped..].to_vec());
    tails.chain((0..19).map(|len| vec![0.1; len])).chain(around_every_bf16())
}

#[test]
fn narrowing_rounds_each_element() {
    for source in sources() {
        let narrowed = on_all_widths(|| {
            let mut target = vec![f16::ZERO; source.len()];
            narrow_f16(&mut target, &source);
            target.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        });
        let expected: Vec<_> = source.iter().map(|x| f16::from_f32_const(*x).to_bits()).collect();
        assert_eq!(narrowed, expected);

        let narrowed = on_all_widths(|| {
            let mut target = vec![bf16::ZERO; source.len()];
            narrow_bf16(&mut target, &source);
            target.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        });
        let expected: Vec<_> = source.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
        assert_eq!(narrowed, expected);
    }
}

#[test]
fn rounding_in_place_is_narrowing_and_widening() {
    for source in sources() {
        let rounded = on_all_widths(|| {
            let mut values = source.clone();
            round_to_f16(&mut values);
            bits(&values)
        });
        let expected: Vec<_> =
            source.iter().map(|x| f16::from_f32_const(*x).to_f32_const().to_bits()).collect();
        assert_eq!(rounded, expected);
    }
}

#[test]
fn widening_is_exact_for_every_16_bit_float() {
    for skipped in 0..9 {
        let patterns: Vec<u16> = (skipped..=u16::MAX).collect();
        let source: Vec<_> = patterns.iter().copied().map(f16::from_bits).collect();
        let expected: Vec<_> = source.iter().map(|x| x.to_f32_const().to_bits()).collect();
        let widened = on_all_widths(|| {
            let mut target = vec![0.0; source.len()];
            widen_f16(&mut target, &source);
            bits(&target)
        });
        assert_eq!(widened, expected);

        let source: Vec<_> = patterns.iter().copied().map(bf16::from_bits).collect();
        let expected: Vec<_> = source.iter().map(|x| x.to_f32().to_bits()).collect();
        let widened = on_all_widths(|| {
            let mut target = vec![0.0; source.len()];
            widen_bf16(&mut target, &source);
            bits(&target)
        });
        assert_eq!(widened, expected);
    }
}
