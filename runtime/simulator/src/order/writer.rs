//! Writes a block, action by action.

use hsdp_flight::{Channel, Op, Stage};
use hsdp_sharding::{Accumulation, DType, FullCopies, Gather, Plan, UnitId};

use super::{Action, Block, Members, Operation, Placement, Reference, Step, Work};

/// The u64 of a step header, of a microbatch header, of an interim record and of a statement without the bits of its parameters.
const HEADER: usize = 9;
pub(super) const MICROBATCH_HEADER: usize = 2;
pub(super) const INTERIM: usize = 4;
pub(super) const STATEMENT: usize = 9;

/// A block that is being written.
pub(super) struct Writer<'a> {
    pub(super) plan: &'a Plan,
    pub(super) step: Step,
    pub(super) block: Block,
}

impl<'a> Writer<'a> {
    pub(super) fn new(plan: &'a Plan, step: Step, microbatch: u64) -> Self {
        let block = Block { times: 1, microbatch, ..Block::default() };
        Self { plan, step, block }
    }

    /// The block, which is written.
    pub(super) fn end(mut self) -> Block {
        let operations = &self.block.operations;
        let mut sorted: Vec<usize> = (0..operations.len()).collect();
        sorted.sort_by_key(|index| operations[*index].channel as usize);
        self.block.places = vec![0; sorted.len()];
        for (place, index) in sorted.into_iter().enumerate() {
            self.block.places[index] = place;
        }
        self.block
    }

    /// The exchange of step headers.
    pub(super) fn opening(mut self) -> Block {
        self.exchange(Stage::Header, HEADER);
        self.end()
    }

    /// The exchange in which ranks say that they have no other microbatch.
    pub(super) fn no_more(mut self) -> Block {
        self.exchange(Stage::Header, MICROBATCH_HEADER);
        self.end()
    }

    /// Whether partials are all-reduced in each microbatch, before they are added.
    pub(super) fn reduces_every_microbatch(&self) -> bool {
        self.has_replicas() && self.plan.options().accumulation == Accumulation::Every
    }

    /// Whether partials are all-reduced once a step.
    pub(super) fn reduces_once(&self) -> bool {
        self.has_replicas() && self.plan.options().accumulation != Accumulation::Every
    }

    fn has_replicas(&self) -> bool {
        self.plan.mesh().replicate_size() > 1
    }

    pub(super) fn is_on_device(&self) -> bool {
        self.step.placement == Placement::Device
    }

    pub(super) fn act(&mut self, action: Action) {
        self.block.actions.push(action);
    }

    pub(super) fn compute(&mut self, work: Work) {
        self.act(Action::Compute(work));
    }

    /// Adds an operation that a later action issues.
    pub(super) fn add(&mut self, operation: Operation) -> usize {
        self.block.operations.push(operation);
        self.block.operations.len() - 1
    }

    pub(super) fn issue(&mut self, operation: Operation) -> usize {
        let index = self.add(operation);
        self.act(Action::Issue(index));
        index
    }

    pub(super) fn need(&mut self, index: usize) {
        self.act(Action::Need(Reference::Here(index)));
    }

    pub(super) fn exchange(&mut self, stage: Stage, words: usize) {
        let (channel, members, op) = (Channel::Control, Members::World, Op::AllGather);
        let (dtype, elements, unit) = (DType::U64, words, None);
        let index = self.issue(Operation { channel, members, op, dtype, elements, stage, unit });
        self.need(index);
    }

    pub(super) fn gather(&mut self, gather: Gather) -> usize {
        let members = match self.plan.options().full_copies {
            FullCopies::PerRank => Members::Shard,
            FullCopies::PerProcess => Members::World,
        };
        self.issue(Operation {
            channel: Channel::Gather,
            members,
            op: Op::AllGather,
            dtype: self.plan.compute_dtype(gather.unit),
            elements: self.plan.layout(gather.unit).shard_len(),
            stage: Stage::Gather,
            unit: Some(gather.unit),
        })
    }

    /// The reduce-scatter of a unit, not issued.
    pub(super) fn reduce_scatter(&self, unit: UnitId) -> Operation {
        Operation {
            channel: Channel::Reduce,
            members: Members::Shard,
            op: Op::ReduceScatter,
            dtype: self.plan.options().reduce_dtype,
            elements: self.plan.layout(unit).trainable().len,
            stage: Stage::Reduce,
            unit: Some(unit),
        }
    }

    /// The all-reduce of a unit, not issued.
    pub(super) fn all_reduce(&self, unit: UnitId) -> Operation {
        Operation {
            channel: Channel::AllReduce,
            members: Members::Replicate,
            op: Op::AllReduce,
            elements: self.plan.layout(unit).trainable().shard_len,
            stage: Stage::AllReduce,
            ..self.reduce_scatter(unit)
        }
    }
}
