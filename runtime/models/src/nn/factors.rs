//! Factors of a layer's products. If its inputs are bf16, gradients are rounded to bf16 before they
//! are multiplied: a processor that multiplies bf16 is faster at it, and others compute with the
//! same factors.

use half::bf16;
use hsdp_kernels::{HostBuffer, Values, ValuesMut, cast, multiplies_bf16, unpack};

use super::element::LayerElement;
use super::rows::{ANY_WIDTH, Rows};

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
    /// Returns the form of the factors in a layer with these inputs.
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
}

/// Returns elements rounded from f32 by several threads.
pub(super) fn narrowed<T: LayerElement>(wide: &[f32]) -> Vec<T> {
    let rows = Rows { inputs: [Values::F32(wide)], width: ANY_WIDTH };
    let [narrow] = rows.map(|_, [x], [y]| y.copy_from_slice(x));
    narrow
}

/// Returns elements rounded to bf16 by several threads, in f32.
fn rounded(wide: &[f32]) -> Vec<f32> {
    let rows = Rows { inputs: [Values::F32(wide)], width: ANY_WIDTH };
    let [rounded] = rows.map(|_, [x], [y]| {
        let narrow = &mut [bf16::ZERO; ANY_WIDTH][..x.len()];
        cast(ValuesMut::BF16(narrow), x);
        unpack(y, Values::BF16(narrow));
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
            let rounded = form.of_gradient(&wide).expect("a rounded gradient");
            assert_eq!(rounded.values().to_f32(), expected);
        }
        assert_eq!(Factors::F32.of_gradient(&wide), None);
    }
}
