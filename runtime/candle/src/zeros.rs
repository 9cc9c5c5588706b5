//! Zeros that stand for a missing gradient.
//!
//! Where a unit's forward cuts candle's graph behind its input, the parameters of the unit still
//! have the input as a parent, and candle needs a gradient for it:
//! [`Usage::gradient_of`](crate::usage::Usage::gradient_of) gives zeros. Units before that one then
//! have gradients of zeros, which would hide that they are not trained. While parameters without a
//! gradient are reported, a pass therefore finds such cuts before its backward. If there is one,
//! gradients of zeros do not count where the output of a unit has zeros, too.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor, TensorId};
use parking_lot::Mutex;

use crate::variables::Reached;

/// The cuts of a pass behind the inputs of units.
#[derive(Debug)]
pub(crate) struct Cuts {
    /// Whether the step reports parameters without a gradient.
    are_sought: bool,
    were_found: AtomicBool,
    uses: Mutex<Vec<Use>>,
}

/// A use of a unit whose input has a history.
#[derive(Debug)]
struct Use {
    input: TensorId,
    output: TensorId,
}

impl Cuts {
    pub(crate) fn new(are_sought: bool) -> Self {
        Self { are_sought, were_found: AtomicBool::new(false), uses: Mutex::default() }
    }

    /// Returns the input for a forward: where cuts are sought, a view of it, which no parameter has
    /// as a parent.
    pub(crate) fn watched(&self, input: &Tensor) -> Result<Tensor> {
        match self.are_sought && input.track_op() {
            // Two views keep the strides.
            true => input.unsqueeze(0)?.squeeze(0),
            false => Ok(input.clone()),
        }
    }

    /// Notes a use that has given the view `input` to its forward.
    pub(crate) fn note(&self, input: &Tensor, output: &Tensor) {
        if self.are_sought && input.track_op() {
            self.uses.lock().push(Use { input: input.id(), output: output.id() });
        }
    }

    /// Seeks cuts in the graph that a backward goes through.
    pub(crate) fn seek(&self, reached: &Reached) {
        let is_cut = |it: &Use| reached.has(it.output) && !reached.has(it.input);
        if self.uses.lock().iter().any(is_cut) {
            self.find();
        }
    }

    /// Notes that there is a cut.
    pub(crate) fn find(&self) {
        self.were_found.store(self.are_sought, Ordering::Relaxed);
    }

    pub(crate) fn were_found(&self) -> bool {
        self.were_found.load(Ordering::Relaxed)
    }
}

/// Returns whether all elements are 0.
pub(crate) fn are_zeros(tensor: &Tensor) -> Result<bool> {
    if tensor.elem_count() == 0 {
        return Ok(true);
    }
    let nonzero = tensor.detach().ne(0.0)?.flatten_all()?.max(0)?;
    Ok(nonzero.to_scalar::<u8>()? == 0)
}
