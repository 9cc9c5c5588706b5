//! A gradient of which one element reads as something else.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use hsdp_kernels::{GradientValues, Values};

/// A gradient whose element 0 reads as `value`, rounded to its dtype. The gradient itself is not written.
#[derive(Debug)]
pub(super) struct Poisoned {
    gradient: Arc<dyn GradientValues>,
    value: f32,
}

/// Poisons the first of the gradients that has an element, if one has.
pub(super) fn poison(gradients: &mut [Option<Arc<dyn GradientValues>>], value: f32) {
    if let Some(gradient) = gradients.iter_mut().flatten().find(|gradient| !gradient.is_empty()) {
        *gradient = Arc::new(Poisoned { gradient: Arc::clone(gradient), value });
    }
}

impl GradientValues for Poisoned {
    fn len(&self) -> usize {
        self.gradient.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        if !range.contains(&0) {
            return self.gradient.read(range, visit);
        }
        self.gradient.read(range, &mut |values| match values {
            Values::F32(values) => visit(Values::F32(&begun_with(self.value, values))),
            Values::F16(values) => {
                visit(Values::F16(&begun_with(f16::from_f32(self.value), values)))
            }
            Values::BF16(values) => {
                visit(Values::BF16(&begun_with(bf16::from_f32(self.value), values)));
            }
        });
    }
}

/// `values`, of which there is at least one, with another first one.
fn begun_with<T: Copy>(first: T, values: &[T]) -> Vec<T> {
    let mut values = values.to_vec();
    values[0] = first;
    values
}
