//! The host of a rank in a step: what it does, action by action, as the machine of the step says.
//! SIMULATOR.md, "The actions of a step".

mod script;

use std::sync::Arc;

use hsdp_flight::{Channel, Op, Stage};
pub use hsdp_sharding::step::Members;
use hsdp_sharding::{DType, Mesh, Plan, UnitId};

use self::script::Script;

/// The memory that holds a rank's part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelPlacement {
    /// The host's: each channel is a sequence of its own.
    Host,
    /// A device's, with a process for each rank: gathers, reductions and all-reduces are one
    /// sequence.
    Device,
}

/// Whether the runtime knows which microbatch is the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Microbatches {
    /// The step began with this number of microbatches.
    Given(u64),
    /// Ranks ask each other before each microbatch, and once more after this many.
    Asked(u64),
}

impl Microbatches {
    /// Returns the number of microbatches.
    #[must_use]
    pub const fn count(self) -> u64 {
        match self {
            Self::Given(count) | Self::Asked(count) => count,
        }
    }
}

/// One operation, as its members issue it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepOperation {
    /// Its channel.
    pub channel: Channel,
    /// Its members.
    pub members: Members,
    /// Its kind.
    pub op: Op,
    /// The dtype of its elements.
    pub dtype: DType,
    /// The number of elements that a member sends, or expects. For a gather of slices it is that of
    /// all members together, whose slices differ in length.
    pub elements: usize,
    /// The stage of the step that it belongs to.
    pub stage: Stage,
    /// The unit, if it is of one unit.
    pub unit: Option<UnitId>,
}

impl StepOperation {
    /// Returns the bytes of its elements.
    pub(crate) fn bytes(&self) -> u64 {
        (self.elements as u64).saturating_mul(self.dtype.size_bytes() as u64)
    }
}

/// An operation that an action means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The operation of this block with this index.
    Here(usize),
    /// The reduce-scatter with this place in the plan's order, in the microbatch before; nothing in
    /// the first microbatch.
    Earlier(usize),
    /// The gather of slices with this place in the order of updates, behind the update before.
    Slices(usize),
}

/// The operations that a walk through the blocks of a rank has issued, each as a handle.
#[derive(Debug)]
pub(crate) struct IssuedHandles<H> {
    /// Operations of the block, by index.
    here: Vec<Option<H>>,
    /// Reduce-scatters of the microbatch before, in the plan's order.
    earlier: Vec<H>,
    /// Gathers of slices behind the update before, in the order of updates.
    slices: Vec<H>,
}

impl<H> Default for IssuedHandles<H> {
    fn default() -> Self {
        Self { here: Vec::new(), earlier: Vec::new(), slices: Vec::new() }
    }
}

impl<H: Clone> IssuedHandles<H> {
    /// Begins a block.
    pub(crate) fn begin(&mut self, block: &StepBlock) {
        self.here.clear();
        self.here.resize(block.operations.len(), None);
    }

    /// Records an operation of the block.
    pub(crate) fn set(&mut self, index: usize, handle: H) {
        self.here[index] = Some(handle);
    }

    /// Finds an operation. There is no microbatch before the first.
    pub(crate) fn find(&self, reference: Reference) -> Option<&H> {
        match reference {
            Reference::Here(index) => self.here[index].as_ref(),
            Reference::Earlier(place) => self.earlier.get(place),
            Reference::Slices(place) => self.slices.get(place),
        }
    }

    /// Ends a block. Its reduce-scatters become the earlier ones, unless it has none: the exchange
    /// in which ranks say that they have no other microbatch is a block, too. So do its gathers of
    /// slices.
    pub(crate) fn end(&mut self, block: &StepBlock) {
        let of_block = |indices: &[usize]| {
            indices.iter().filter_map(|index| self.here[*index].clone()).collect()
        };
        if !block.scatters.is_empty() {
            self.earlier = of_block(&block.scatters);
        }
        if !block.slices.is_empty() {
            self.slices = of_block(&block.slices);
        }
    }
}

/// Computation of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// The forward of a unit.
    Forward(UnitId),
    /// The loss.
    Loss,
    /// The backward of a unit, with its forward again where activations are recomputed.
    Backward(UnitId),
    /// Mode `Local`: a unit's gradients are added to those of the microbatches before.
    Accumulate(UnitId),
    /// Mode `Every`: a unit's all-reduced sums are added to its partial.
    Fold(UnitId),
    /// The norm of the gradients.
    Norm,
    /// The update of the rank's shards.
    Update,
    /// The update of the rank's slice of a unit, in place of the update of its shards if replicas
    /// divide state.
    UpdateSlice(UnitId),
}

/// An action of a rank's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Issues an operation of this block, unless [`IssueReady`](Self::IssueReady) has issued it.
    Issue(usize),
    /// Issues the next of the block's [all-reduces](StepBlock::all_reduces), as far as their
    /// reduce-scatters are complete.
    IssueReady,
    /// The result is needed for what follows.
    Need(Reference),
    /// The next operation on the same buffer follows this one.
    Settle(Reference),
    /// The host reads what was computed.
    Read,
    /// Computes.
    Compute(Work),
}

/// A part of a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepBlock {
    /// The number of times in a row.
    pub times: u64,
    /// The microbatch that its first time is or belongs to, from 0.
    pub microbatch: u64,
    /// Its operations; each channel issues its own in this order, and where all channels are one
    /// sequence, all are.
    pub operations: Vec<StepOperation>,
    /// The actions.
    pub actions: Vec<Action>,
    /// The indices of its reduce-scatters, in the order of issue.
    pub scatters: Vec<usize>,
    /// All-reduces, or reduce-scatters of sums, that are issued once their reduce-scatters are
    /// complete, in order: the reduce-scatter that each follows, and its own index.
    pub all_reduces: Vec<(Reference, usize)>,
    /// The indices of its gathers of slices, in the order of issue.
    pub slices: Vec<usize>,
}

/// The actions of a rank in a step, and the operations that they mean. They are the same on all
/// ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The mesh.
    pub mesh: Mesh,
    /// The memory that holds the model.
    pub placement: ModelPlacement,
    /// The parts of the step: the opening, the microbatches, the finish. If replicas divide state,
    /// the update of the step before comes first.
    pub blocks: Vec<StepBlock>,
}

impl Order {
    /// Returns the order of a step by a plan, whose units the forward uses in the plan's order, in
    /// every step but the first. All ranks have data, and the loss scale is fixed.
    ///
    /// It holds for optimizers that exchange nothing.
    ///
    /// If replicas [divide](Plan::divides_state) state, gathers of slices outlast the update in
    /// which they are issued. The order then begins behind the statement of the step before, with
    /// its update, and ends with the statement, where no operation is under way. All such steps
    /// take the same time, from one statement to the next.
    #[must_use]
    pub fn of(plan: &Arc<Plan>, microbatches: Microbatches, placement: ModelPlacement) -> Self {
        let blocks = Script::new(plan, placement).run(microbatches);
        Self { mesh: plan.mesh(), placement, blocks }
    }
}
