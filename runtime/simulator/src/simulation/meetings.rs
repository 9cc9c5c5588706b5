//! The operations of a block: each begins when it is the first of its stream on all members.

use std::collections::VecDeque;

use hsdp_flight::Channel;
use hsdp_sharding::Mesh;

use super::colors::Colors;
use super::{Costs, OperationCost};
use crate::Time;
use crate::host::{ModelPlacement, StepBlock};

/// An operation of a block, in a group.
#[derive(Clone, Copy, Debug, Default)]
struct OperationMeeting {
    /// The members for which it is the first of its stream.
    heads: usize,
    /// When the last of them was ready.
    begins: Time,
    /// When it ends, once all are.
    ends: Option<Time>,
    cost: Option<OperationCost>,
}

/// An operation that a color has issued.
#[derive(Clone, Copy, Debug)]
struct IssuedOperation {
    index: usize,
    ready: Time,
}

/// The times of an operation for a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Times {
    /// When this member could have begun.
    pub(super) could: Time,
    /// When all members could.
    pub(super) begins: Time,
    pub(super) ends: Time,
}

impl Times {
    pub(super) fn advance(&mut self, by: Time) {
        [&mut self.could, &mut self.begins, &mut self.ends].into_iter().for_each(|it| *it += by);
    }
}

/// A stream of collectives of a color.
#[derive(Clone, Debug, Default)]
struct ColorStream {
    /// When the last operation ends that has a time.
    free: Time,
    /// Operations that have none.
    queue: VecDeque<IssuedOperation>,
}

/// Streams of collectives of a color.
pub(crate) const STREAMS: usize = 5;

/// Returns the stream of a channel. On a device, gathers, reductions and all-reduces share one.
pub(crate) const fn stream(channel: Channel, placement: ModelPlacement) -> usize {
    match (channel, placement) {
        (Channel::Control, _) => 0,
        (Channel::Statistics, _) => 4,
        (Channel::Gather, _) | (_, ModelPlacement::Device) => 1,
        (Channel::Reduce, ModelPlacement::Host) => 2,
        (_, ModelPlacement::Host) => 3,
    }
}

/// The streams of all colors.
#[derive(Clone, Debug)]
pub(super) struct ColorStreams {
    of: Vec<[ColorStream; STREAMS]>,
}

impl ColorStreams {
    pub(super) fn new(colors: usize) -> Self {
        Self { of: vec![Default::default(); colors] }
    }

    /// When a stream is free.
    pub(super) fn free(&self, color: usize) -> [Time; STREAMS] {
        std::array::from_fn(|stream| self.of[color][stream].free)
    }

    /// Moves the streams of a color to a later time.
    pub(super) fn advance(&mut self, color: usize, by: Time) {
        self.of[color].iter_mut().for_each(|stream| stream.free += by);
    }
}

/// A stream with another first operation, which comes to its meeting next.
struct StreamHead {
    color: usize,
    stream: usize,
}

/// The input of the simulation of a block.
#[derive(Clone, Copy)]
pub(super) struct Machinery<'a> {
    pub(super) mesh: Mesh,
    pub(super) placement: ModelPlacement,
    pub(super) colors: &'a Colors,
    pub(super) costs: &'a dyn Costs,
}

/// The operations of a block in all groups.
pub(super) struct Meetings<'a> {
    world: Machinery<'a>,
    block: &'a StepBlock,
    /// Operations by group and index.
    of: Vec<Vec<OperationMeeting>>,
    /// Times at which a color could have begun an operation, by color and index.
    could: Vec<Vec<Time>>,
}

impl<'a> Meetings<'a> {
    pub(super) fn new(world: &Machinery<'a>, block: &'a StepBlock) -> Self {
        let count = block.operations.len();
        let of = vec![vec![OperationMeeting::default(); count]; world.colors.classes()];
        let could = vec![vec![Time::ZERO; count]; world.colors.len()];
        Self { world: *world, block, of, could }
    }

    /// Returns the group in which ranks of a color make an operation.
    fn group(&self, color: usize, index: usize) -> usize {
        self.world.colors.group(color, self.block.operations[index].members)
    }

    /// Returns the stream of an operation.
    pub(super) fn stream(&self, index: usize) -> usize {
        stream(self.block.operations[index].channel, self.world.placement)
    }

    /// Returns the cost of an operation for a color.
    pub(super) fn cost(&mut self, color: usize, index: usize) -> OperationCost {
        let group = self.group(color, index);
        let Machinery { colors, costs, .. } = self.world;
        let operation = &self.block.operations[index];
        let cost = || costs.operation(operation, colors.class(group).shape);
        *self.of[group][index].cost.get_or_insert_with(cost)
    }

    /// Returns the times of an operation, once all of its members have issued it.
    pub(super) fn times(&self, color: usize, index: usize) -> Option<Times> {
        let OperationMeeting { begins, ends, .. } = self.of[self.group(color, index)][index];
        Some(Times { could: self.could[color][index], begins, ends: ends? })
    }

    /// Issues an operation of a color that is ready at a time, and gives times to all operations
    /// whose turn it is then.
    pub(super) fn issue(
        &mut self,
        streams: &mut ColorStreams,
        color: usize,
        index: usize,
        ready: Time,
    ) {
        let stream = self.stream(index);
        let queue = &mut streams.of[color][stream].queue;
        queue.push_back(IssuedOperation { index, ready });
        let mut heads =
            if queue.len() == 1 { vec![StreamHead { color, stream }] } else { Vec::new() };
        while let Some(StreamHead { color, stream }) = heads.pop() {
            if let Some(last) = self.come(&streams.of[color][stream], color) {
                self.go(streams, color, last, &mut heads);
            }
        }
    }

    /// Counts the first operation of a stream at its meeting. Returns its index if all members have
    /// come.
    fn come(&mut self, stream: &ColorStream, color: usize) -> Option<usize> {
        let IssuedOperation { index, ready } = *stream.queue.front()?;
        let could = ready.max(stream.free);
        self.could[color][index] = could;
        let group = self.group(color, index);
        let meeting = &mut self.of[group][index];
        meeting.heads += 1;
        meeting.begins = meeting.begins.max(could);
        (meeting.heads == self.world.colors.class(group).colors.len()).then_some(index)
    }

    /// Completes an operation. It leaves the streams of its members, and their next operations
    /// become heads.
    fn go(
        &mut self,
        streams: &mut ColorStreams,
        color: usize,
        index: usize,
        heads: &mut Vec<StreamHead>,
    ) {
        let stream = self.stream(index);
        let link = self.cost(color, index).link;
        let group = self.group(color, index);
        let meeting = &mut self.of[group][index];
        let ends = meeting.begins + link;
        meeting.ends = Some(ends);
        for color in &self.world.colors.class(group).colors {
            let of_member = &mut streams.of[*color][stream];
            of_member.queue.pop_front();
            of_member.free = ends;
            heads.push(StreamHead { color: *color, stream });
        }
    }
}
