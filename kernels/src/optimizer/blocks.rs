//! An update in one pass over memory: a block is divided, updated and rounded while it is in the
//! cache.

use std::ops::Range;

use crate::convert::cast;
use crate::scale::scaled_copy;
use crate::values::ValuesMut;

/// The number of elements that are divided, updated and rounded at a time. Four f32 buffers of this
/// length take a small part of a second-level cache, and the fixed cost of a block (for AdamW two
/// powers) is small compared to its elements.
pub const UPDATE_BLOCK: usize = 4096;

/// The slices that an update reads and writes besides the state of its optimizer. All have one
/// length.
#[derive(Debug)]
pub struct FusedUpdate<'a> {
    /// f32 master parameters.
    pub parameters: &'a mut [f32],
    /// The target of a copy of the updated parameters in another dtype, if one is needed. It is
    /// written, and never read.
    pub rounded: Option<ValuesMut<'a>>,
    /// The f32 gradient, which is read in place.
    pub gradient: &'a [f32],
    /// The divisor of the gradient. The quotient is computed in f64 and rounded to f32 once.
    pub divisor: f64,
}

/// Calls `update` for block after block, in order, with the block's range, its parameters, and its
/// divided gradient. After each block, the updated parameters are rounded into `fused.rounded`.
///
/// The bits are those of [`divide_in_place`](crate::divide_in_place), an update, and [`cast`], each
/// over all elements. The gradient is read once and not changed. If `update` panics, the parameters
/// of its block are still rounded, so both copies agree.
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
    assert_eq!(gradient.len(), len, "update in blocks: lengths of gradient and parameters differ");
    let rounded_len = rounded.as_ref().map_or(len, ValuesMut::len);
    assert_eq!(rounded_len, len, "update in blocks: lengths of rounded and parameters differ");
    let mut divided = [0.0; UPDATE_BLOCK];
    for start in (0..len).step_by(UPDATE_BLOCK) {
        let range = start..len.min(start + UPDATE_BLOCK);
        let gradient = quotient(&mut divided, &gradient[range.clone()], divisor);
        let block = RoundedWhenDone {
            parameters: &mut parameters[range.clone()],
            rounded: rounded.as_mut().map(|all| all.reborrow().slice(range.clone())),
        };
        update(range, &mut *block.parameters, gradient);
    }
}

/// The divided gradient, or the gradient itself if the divisor is 1.
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
