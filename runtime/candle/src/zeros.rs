//! Parameters that get zeros although the loss of this rank does not depend on them.
//!
//! Ops of hsdp give zeros to parents that only set the order of a backward, because candle needs a
//! gradient for each of them. There are two kinds of such parents, and zeros must not be taken for
//! a gradient in either case.
//!
//! The output of a unit has the inputs of the unit as such parents. A pass that looks for cuts
//! leaves out an input that the output does not depend on. [`UnitCuts`] lists these inputs.
//!
//! A collective of a tape has the collective before it as such a parent, because the ranks
//! communicate in one order, even if their losses depend on different collectives. If the loss does
//! not depend on the output of a collective, and the other ranks contribute zeros, then the
//! gradient of its input is zeros that stand for none. A [`ZeroSearch`] finds the parameters that
//! get only such zeros.

use std::cell::RefCell;
use std::collections::HashSet;

use candle_core::{Result, Tensor, TensorId};
use parking_lot::Mutex;

use crate::gradient::GradientSum;
use crate::variables::Reached;

/// Inputs of a pass's units after which the unit cuts the graph.
#[derive(Debug, Default)]
pub(crate) struct UnitCuts(Mutex<Vec<CutInput>>);

/// An input that has a history, and that the output of its unit does not depend on.
#[derive(Clone, Debug)]
pub(crate) struct CutInput {
    pub(crate) unit: String,
    /// Index among the inputs of the unit.
    pub(crate) index: usize,
    /// Number of inputs of the unit.
    pub(crate) count: usize,
    pub(crate) output: TensorId,
}

impl CutInput {
    /// Returns the name of the unit, and the place of the input among several.
    fn described(&self) -> String {
        let Self { unit, index, count, .. } = self;
        match count {
            1 => unit.clone(),
            _ => format!("{unit} (input {} of {count})", index + 1),
        }
    }
}

impl UnitCuts {
    /// Records a cut.
    pub(crate) fn note(&self, cut: CutInput) {
        self.0.lock().push(cut);
    }

    /// Describes the inputs of units that a backward reaches.
    pub(crate) fn described(&self, reached: &Reached) -> Vec<String> {
        let cuts = self.0.lock();
        let cuts = cuts.iter().filter(|cut| reached.has(cut.output));
        let mut inputs: Vec<String> = cuts.map(CutInput::described).collect();
        inputs.dedup();
        inputs
    }
}

thread_local! {
    static GRAPH: RefCell<Option<Graph>> = const { RefCell::new(None) };
}

/// A backward of this thread that looks for collectives that the loss does not depend on.
#[derive(Debug)]
pub(crate) struct ZeroSearch(());

impl ZeroSearch {
    /// Begins a search in the backward of a loss.
    pub(crate) fn begin(loss: &Tensor) -> Self {
        GRAPH.set(Some(Graph::of(loss)));
        Self(())
    }

    /// Ends the search. Returns whether it has found such a collective.
    pub(crate) fn end(self) -> bool {
        GRAPH.with_borrow(|graph| graph.as_ref().is_some_and(|it| !it.unneeded.is_empty()))
    }
}

impl Drop for ZeroSearch {
    fn drop(&mut self) {
        GRAPH.set(None);
    }
}

/// The graph of a loss, with the parents that only set the order of collectives.
#[derive(Debug)]
struct Graph {
    loss: Tensor,
    nodes: HashSet<TensorId>,
    /// Outputs of reached collectives that nothing depends on.
    unneeded: HashSet<TensorId>,
    /// Tensors that these collectives depend on.
    before: HashSet<TensorId>,
    /// Tensors that the loss depends on, as far as the graph shows it. `None` before they are
    /// searched.
    needed: Option<HashSet<TensorId>>,
}

impl Graph {
    fn of(loss: &Tensor) -> Self {
        Self {
            loss: loss.clone(),
            nodes: ids_before(loss).collect(),
            unneeded: HashSet::new(),
            before: HashSet::new(),
            needed: None,
        }
    }

    /// Records that zeros stand for the gradient of the input of a collective.
    fn note(&mut self, input: &Tensor, output: &Tensor) {
        self.unneeded.insert(output.id());
        self.before.extend(ids_before(input));
        self.needed = None;
    }

    /// Returns whether the loss depends on a tensor. The backward has already reached everything
    /// that depends on the tensor.
    fn needs(&mut self, tensor: TensorId) -> bool {
        if !self.before.contains(&tensor) {
            return self.nodes.contains(&tensor);
        }
        let Self { loss, unneeded, before, needed, .. } = self;
        needed.get_or_insert_with(|| needed_by(loss, unneeded, before)).contains(&tensor)
    }
}

/// Finds tensors that a loss depends on through a path without an unneeded collective. candle shows
/// no parents, only all tensors before one. So a path begins at a tensor that is not before an
/// unneeded collective, and has none before it.
fn needed_by(
    loss: &Tensor,
    unneeded: &HashSet<TensorId>,
    before: &HashSet<TensorId>,
) -> HashSet<TensorId> {
    let mut needed = HashSet::new();
    for node in loss.sorted_nodes() {
        let id = node.id();
        if needed.contains(&id) || before.contains(&id) {
            continue;
        }
        let ids: Vec<_> = ids_before(node).collect();
        if !ids.iter().any(|id| unneeded.contains(id)) {
            needed.extend(ids);
        }
    }
    needed
}

/// Returns a tensor with a history, and the tensors that lead to it.
pub(crate) fn ids_before(tensor: &Tensor) -> impl Iterator<Item = TensorId> {
    tensor.sorted_nodes().into_iter().map(Tensor::id)
}

/// Returns whether variables lead to a tensor, through ops that have gradients.
pub(crate) fn has_variables_before(tensor: &Tensor) -> bool {
    ids_before(tensor).next().is_some()
}

/// A collective in candle's graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedCollective<'a> {
    pub(crate) input: &'a Tensor,
    pub(crate) output: &'a Tensor,
    /// View of the output that the program has.
    pub(crate) view: TensorId,
}

/// Records the gradient of the input of a collective, in the backward of the collective.
pub(crate) fn note_collective(collective: &AppliedCollective<'_>, gradient: &Tensor) -> Result<()> {
    GRAPH.with_borrow_mut(|graph| {
        let Some(graph) = graph else { return Ok(()) };
        if !graph.needs(collective.view) && are_zeros(gradient)? {
            graph.note(collective.input, collective.output);
        }
        Ok(())
    })
}

/// Returns whether a gradient counts, in the backward of `tensor`, which is the parameter or a
/// recomputed unit that reads it. Zeros count only if the loss depends on that tensor.
pub(crate) fn counts(tensor: TensorId, gradient: &GradientSum) -> Result<bool> {
    let is_needed = |graph: &mut Option<Graph>| graph.as_mut().is_none_or(|it| it.needs(tensor));
    if GRAPH.with_borrow_mut(is_needed) {
        return Ok(true);
    }
    Ok(match gradient {
        GradientSum::Host(gradient) => gradient.elements().iter().any(|it| *it != 0.0),
        GradientSum::Tensor(gradient) => !are_zeros(gradient)?,
    })
}

/// Returns the gradient of a parent that only sets the order. It is zeros if candle tracks the
/// parent, because candle panics if such a parent gets none.
pub(crate) fn for_parent(parent: &Tensor) -> Result<Option<Tensor>> {
    // One zero, repeated: candle adds it to the gradient without a second buffer to fill and read.
    let zero = || Tensor::zeros((), parent.dtype(), parent.device())?.broadcast_as(parent.shape());
    parent.track_op().then(zero).transpose()
}

/// Returns whether all elements are 0.
fn are_zeros(tensor: &Tensor) -> Result<bool> {
    if tensor.elem_count() == 0 {
        return Ok(true);
    }
    let nonzero = tensor.detach().ne(0.0)?.flatten_all()?.max(0)?;
    Ok(nonzero.to_scalar::<u8>()? == 0)
}
