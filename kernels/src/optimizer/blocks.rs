//! An update in one pass over memory: what comes before it and after it is done to a block while that is in the cache.

use std::ops::Range;

use crate::convert::cast;
use crate::scale::scaled_copy;
use crate::values::ValuesMut;

/// How many elements are divided, updated and rounded at a time: four f32 buffers of this length lie in a second-level
/// cache beside much else, and what a block costs by itself (AdamW: two powers) is little beside its elements.
const BLOCK: usize = 4096;

/// What an update reads and writes beside the state of its optimizer. All slices have one length.
#[derive(Debug)]
pub struct FusedUpdate<'a> {
    /// f32 master parameters.
    pub parameters: &'a mut [f32],
    /// Where the updated parameters are also wanted, rounded to another dtype: written, and never read.
    pub rounded: Option<ValuesMut<'a>>,
    /// f32, read in place.
    pub gradient: &'a [f32],
    /// By what the gradient is divided, in f64 and rounded to f32 once.
    pub divisor: f64,
}

/// Calls `update` for block after block, in order: with its range, its parameters, and its gradient, which is divided. Then
/// rounds what became of the parameters.
///
/// It is, bit for bit, [`divide_in_place`](crate::divide_in_place), an update, and [`cast`], each over all elements. The
/// gradient is read once and stays as it was. Parameters are rounded also where `update` panics: the two stay alike.
///
/// # Panics
///
/// If the slices differ in length.
pub fn update_in_blocks(
    fused: FusedUpdate<'_>,
    mut update: impl FnMut(Range<usize>, &mut [f32], &[f32]),
) {
    let FusedUpdate { parameters, mut rounded, gradient, divisor } = fused;
    let len = parameters.len();
    assert_eq!(gradient.len(), len, "update in blocks: lengths of gradient and parameters");
    let rounded_len = rounded.as_ref().map_or(len, ValuesMut::len);
    assert_eq!(rounded_len, len, "update in blocks: lengths of rounded and parameters");
    let mut divided = [0.0; BLOCK];
    for start in (0..len).step_by(BLOCK) {
        let range = start..len.min(start + BLOCK);
        let gradient = quotient(&mut divided, &gradient[range.clone()], divisor);
        let block = RoundedWhenDone {
            parameters: &mut parameters[range.clone()],
            rounded: rounded.as_mut().map(|all| all.reborrow().slice(range.clone())),
        };
        update(range, &mut *block.parameters, gradient);
    }
}

/// The gradient divided: itself, where that changes nothing.
fn quotient<'a>(block: &'a mut [f32], gradient: &'a [f32], divisor: f64) -> &'a [f32] {
    if divisor == 1.0 {
        return gradient;
    }
    let block = &mut block[..gradient.len()];
    scaled_copy(block, gradient, divisor);
    block
}

/// Parameters that are rounded when this is dropped, since an update may unwind.
struct RoundedWhenDone<'a> {
    parameters: &'a mut [f32],
    rounded: Option<ValuesMut<'a>>,
}

impl Drop for RoundedWhenDone<'_> {
    fn drop(&mut self) {
        if let Some(rounded) = &mut self.rounded {
            cast(rounded.reborrow(), self.parameters);
        }
    }
}

#[cfg(test)]
mod tests;
