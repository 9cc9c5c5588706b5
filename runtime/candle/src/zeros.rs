//! Zeros that stand for a missing gradient.
//!
//! Where a unit's forward cuts candle's graph behind its input, the parameters of the unit still
//! have the input as a parent, and candle needs a gradient for it:
//! [`Usage::gradient_of`](crate::usage::Usage::gradient_of) gives zeros. Units before that one then
//! have gradients of zeros, which would hide that they are not trained. A pass therefore seeks such
//! cuts before its backward. If there is one, gradients of zeros do not count in units before it
//! whose output has zeros, too. candle shows no op of a tensor, so nothing tells these from zeros
//! that a loss really has.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use candle_core::{Result, Tensor, TensorId};
use parking_lot::Mutex;

use crate::usage::Usage;
use crate::variables::Reached;

/// The uses of units in a pass whose inputs have a history.
#[derive(Debug, Default)]
pub(crate) struct Uses(Mutex<Vec<Use>>);

#[derive(Debug)]
struct Use {
    unit: String,
    input: Tensor,
    /// The view that the forward has of the input; `None` if the output is known not to depend on
    /// the input.
    view: Option<TensorId>,
    usage: Arc<Usage>,
}

/// Tensors before the cuts of a pass, once its backward begins. Ops hold it, and it holds none.
#[derive(Debug, Default)]
pub(crate) struct Cuts(OnceLock<HashSet<TensorId>>);

impl Uses {
    /// Notes a use that has given the forward this view of its input.
    pub(crate) fn note(
        &self,
        unit: &str,
        input: &Tensor,
        view: Option<TensorId>,
        usage: &Arc<Usage>,
    ) {
        let (unit, input, usage) = (unit.to_owned(), input.clone(), Arc::clone(usage));
        self.0.lock().push(Use { unit, input, view, usage });
    }

    /// Seeks cuts in the graph that a backward goes through. Returns the names of the units.
    pub(crate) fn seek(&self, reached: &Reached, cuts: &Cuts) -> Vec<String> {
        let uses = self.0.lock();
        let is_cut = |it: &&Use| {
            let is_seen = it.view.is_some_and(|view| reached.has(view));
            !is_seen && it.usage.gives_zeros_in(reached)
        };
        let cutting: Vec<&Use> = uses.iter().filter(is_cut).collect();
        if cutting.is_empty() {
            return Vec::new();
        }
        let before = cutting.iter().flat_map(|it| it.input.sorted_nodes());
        let _ = cuts.0.set(before.map(Tensor::id).collect());
        let mut units: Vec<String> = cutting.into_iter().map(|it| it.unit.clone()).collect();
        units.dedup();
        units
    }
}

impl Cuts {
    /// Returns whether a tensor is before a cut.
    pub(crate) fn are_behind(&self, tensor: &Tensor) -> bool {
        self.0.get().is_some_and(|before| before.contains(&tensor.id()))
    }
}

/// Returns a view of a tensor with its strides: a tensor of its own in the graph.
pub(crate) fn view(tensor: &Tensor) -> Result<Tensor> {
    tensor.unsqueeze(0)?.squeeze(0)
}

/// Returns whether all elements are 0.
pub(crate) fn are_zeros(tensor: &Tensor) -> Result<bool> {
    if tensor.elem_count() == 0 {
        return Ok(true);
    }
    let nonzero = tensor.detach().ne(0.0)?.flatten_all()?.max(0)?;
    Ok(nonzero.to_scalar::<u8>()? == 0)
}
