//! Factors of a layer's products. A layer that multiplies inputs of bf16 rounds its other factors,
//! such as gradients, to bf16, on all processors alike: some multiply bf16 faster than f32.

use half::bf16;
use hsdp_kernels::{HostBuffer, Values, ValuesMut, cast, multiplies_bf16, unpack};

use super::rows::{ANY_WIDTH, Rows, narrowed};

/// Form of the factors of a layer's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Factors {
    /// Elements of f32.
    F32,
    /// Elements of f32 that are rounded to bf16.
    Rounded,
    /// Elements of bf16.
    BF16,
}

impl Factors {
    /// Returns the form of the factors in a layer that multiplies these inputs.
    pub(super) fn of(inputs: &[Values<'_>]) -> Self {
        if !inputs.iter().all(|it| matches!(it, Values::BF16(_))) {
            Self::F32
        } else if multiplies_bf16() {
            Self::BF16
        } else {
            Self::Rounded
        }
    }

    /// Rounds a gradient to this form, by several threads. Returns `None` for f32, since the
    /// gradient has that form already.
    pub(super) fn of_gradient(self, g: &[f32]) -> Option<HostBuffer> {
        match self {
            Self::F32 => None,
            Self::Rounded => Some(HostBuffer::F32(rounded(g))),
            Self::BF16 => Some(HostBuffer::BF16(narrowed(g))),
        }
    }

    /// Converts inputs and gradients to this form.
    pub(super) fn convert(self, elements: HostBuffer) -> HostBuffer {
        match (self, elements) {
            (Self::F32, HostBuffer::F32(wide)) => HostBuffer::F32(wide),
            (Self::BF16, HostBuffer::BF16(narrow)) => HostBuffer::BF16(narrow),
            (Self::Rounded, HostBuffer::F32(mut wide)) => {
                let mut narrow = vec![bf16::ZERO; wide.len()];
                self.round(&mut wide, &mut narrow);
                HostBuffer::F32(wide)
            }
            (Self::BF16, HostBuffer::F32(wide)) => {
                let mut narrow = vec![bf16::ZERO; wide.len()];
                cast(ValuesMut::BF16(&mut narrow), &wide);
                HostBuffer::BF16(narrow)
            }
            (Self::F32, narrow) | (Self::Rounded, narrow @ HostBuffer::BF16(_)) => {
                HostBuffer::F32(narrow.values().to_f32())
            }
            (Self::Rounded | Self::BF16, HostBuffer::F16(_)) => {
                unreachable!("f16 beside inputs of bf16")
            }
        }
    }

    /// Rounds `wide` to this form. Returns `narrow`, which it fills, if the form is bf16, and
    /// `wide` otherwise. For f32 it does not use `narrow`.
    ///
    /// # Panics
    /// If the form is not f32 and the lengths differ.
    pub(super) fn round<'a>(self, wide: &'a mut [f32], narrow: &'a mut [bf16]) -> Values<'a> {
        if self == Self::F32 {
            return Values::F32(wide);
        }
        cast(ValuesMut::BF16(narrow), wide);
        if self == Self::BF16 {
            return Values::BF16(narrow);
        }
        unpack(wide, Values::BF16(narrow));
        Values::F32(wide)
    }
}

/// Returns elements rounded to bf16 by several threads, in f32.
fn rounded(wide: &[f32]) -> Vec<f32> {
    let rows = Rows { inputs: [Values::F32(wide)], width: ANY_WIDTH };
    let [rounded] = rows.map(|_, [x], [y]| {
        y.copy_from_slice(x);
        Factors::Rounded.round(y, &mut [bf16::ZERO; ANY_WIDTH][..x.len()]);
    });
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_elements_are_the_same_in_all_forms() {
        let wide: Vec<f32> =
            (0..5000).map(|it| (it as f32).sin() * 1.7_f32.powi(it % 200)).collect();
        let expected: Vec<f32> = wide.iter().map(|it| bf16::from_f32(*it).to_f32()).collect();
        for form in [Factors::Rounded, Factors::BF16] {
            let of_gradient = form.of_gradient(&wide).expect("a rounded gradient");
            let converted = form.convert(wide.clone().into());
            assert_eq!(of_gradient, converted);
            assert_eq!(converted.values().to_f32(), expected);
            assert_eq!(form.convert(converted).values().to_f32(), expected);
        }
        assert_eq!(Factors::F32.of_gradient(&wide), None);
        assert_eq!(Factors::F32.convert(wide.clone().into()), HostBuffer::F32(wide));
    }
}
