//! The gathers of one microbatch, or of one batch of an evaluation: issued in the order of the units,
//! whatever the order in which the program needs them.

use std::sync::Arc;

use super::finding::Finding;
use super::order::{Order, Orders};
use super::{Operation, Output, Refused, Rules, UnitOrder};
use crate::{AfterForward, Gather, ModelSpec, Phase, UnitId};

/// One place in the sequence of gathers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Not issued. Slots before an issued one are never in this state.
    Waiting,
    /// Under way, as far as the machine knows.
    Issued,
    /// Complete, and neither handed out nor dropped.
    Arrived,
    /// Handed out, or dropped.
    Taken,
}

/// Purpose of the gathers.
#[derive(Debug)]
pub(super) enum Purpose {
    /// A microbatch. The first forward finds the order of the model.
    Training,
    /// A forward alone. If the order of the model is open, the first forward of the evaluation finds
    /// an order for the others.
    Evaluation(Option<Arc<Order>>),
}

/// The sequence of the gathers.
#[derive(Debug)]
pub(super) enum Sequence {
    /// In this order.
    Known(Arc<Order>),
    /// As the forward goes. There is no gather ahead.
    Finding(Finding),
}

/// The gathers of one microbatch, or of one batch.
#[derive(Debug)]
pub(super) struct Gathers {
    pub(super) purpose: Purpose,
    pub(super) sequence: Sequence,
    pub(super) slots: Vec<Slot>,
    /// Number of slots that were issued: all before that index, and none from it on.
    pub(super) issued: usize,
    /// Place of the last gather for the forward that was taken.
    last_in_forward: Option<usize>,
    /// Number of first slots that the end of the forward has dropped, or keeps.
    forward_ended: usize,
    /// Number of first slots that are all taken, as far as the end of the microbatch has seen.
    ended: usize,
}

impl Gathers {
    pub(super) fn new(purpose: Purpose) -> Self {
        Self {
            purpose,
            sequence: Sequence::Finding(Finding::default()),
            slots: Vec::new(),
            issued: 0,
            last_in_forward: None,
            forward_ended: 0,
            ended: 0,
        }
    }

    /// Begins a microbatch, when the one before is over.
    pub(super) fn begin(&mut self, orders: &Orders) {
        self.slots.clear();
        self.last_in_forward = None;
        (self.issued, self.forward_ended, self.ended) = (0, 0, 0);
        let known = match (orders.known(), &self.purpose) {
            (Some(known), _) => Some(Arc::clone(known)),
            (None, Purpose::Evaluation(kept)) => kept.clone(),
            (None, Purpose::Training) => None,
        };
        match known {
            Some(order) => self.follow(order),
            None => self.sequence = Sequence::Finding(Finding::default()),
        }
    }

    /// Goes on by an order that the gathers so far begin.
    pub(super) fn follow(&mut self, order: Arc<Order>) {
        let gathers = match &self.purpose {
            Purpose::Training => order.gathers().len(),
            Purpose::Evaluation(_) => order.plan.order().len(),
        };
        self.slots.resize(gathers, Slot::Waiting);
        self.sequence = Sequence::Known(order);
    }

    /// Returns the gather at a place.
    pub(super) fn gather(&self, place: usize) -> Gather {
        match &self.sequence {
            Sequence::Known(order) => order.gathers()[place],
            Sequence::Finding(finding) => {
                Gather { unit: finding.found[place], phase: Phase::Forward }
            }
        }
    }

    /// Returns the place of the next gather of `unit`, if there is one.
    pub(super) fn place_of(&self, unit: UnitId) -> Option<usize> {
        let is_open = |place: &usize| self.slots.get(*place).is_some_and(|it| *it != Slot::Taken);
        match &self.sequence {
            Sequence::Known(order) => order.places_of(unit).find(is_open),
            Sequence::Finding(finding) => {
                finding.found.iter().position(|found| *found == unit).filter(is_open)
            }
        }
    }

    /// Checks that `unit` may be needed now. Where the order is being found, a second use of a unit
    /// belongs to the backward.
    pub(super) fn check(
        &self,
        rules: &Rules,
        spec: &ModelSpec,
        (unit, microbatch): (UnitId, usize),
    ) -> Result<(), Refused> {
        let is_left = match &self.sequence {
            Sequence::Finding(finding) if finding.found.contains(&unit) => {
                spec[unit].after_forward == AfterForward::Reshard
                    && matches!(self.purpose, Purpose::Training)
            }
            Sequence::Finding(_) => true,
            Sequence::Known(_) => self.place_of(unit).is_some(),
        };
        if !is_left {
            return Err(Refused::NoGatherLeft { unit, microbatch });
        }
        let last = self.last_in_forward.filter(|_| rules.order == UnitOrder::Error);
        match last {
            Some(last) if self.place_of(unit).is_some_and(|place| place < last) => {
                Err(Refused::OutOfOrder { unit, after: self.gather(last).unit })
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the next gather of `unit` belongs to the backward.
    pub(super) fn next_is_backward(&self, unit: UnitId) -> bool {
        match &self.sequence {
            Sequence::Finding(finding) => finding.found.contains(&unit),
            Sequence::Known(_) => {
                self.place_of(unit).is_some_and(|at| self.gather(at).phase == Phase::Backward)
            }
        }
    }

    /// Returns the number of gathers that are issued, at least, when the one at a place is handed out.
    pub(super) fn end_of_prefetch(&self, place: usize, prefetch: usize) -> usize {
        self.slots.len().min(place.saturating_add(prefetch).saturating_add(1))
    }

    /// Issues the next gather, if fewer than `end` were issued.
    pub(super) fn issue_next(&mut self, end: usize) -> Option<Output> {
        let place = self.issued;
        if place >= end.min(self.slots.len()) {
            return None;
        }
        self.slots[place] = Slot::Issued;
        self.issued += 1;
        let Gather { unit, phase } = self.gather(place);
        Some(Output::Gather { place, unit, phase })
    }

    /// Hands out the gather at a place, behind the issue of the first `end`.
    pub(super) fn take_next(&mut self, place: usize, end: usize) -> Option<Output> {
        self.issue_next(end).or_else(|| {
            self.end_next(place, |Gather { unit, phase }| Output::Hand { place, unit, phase })
        })
    }

    /// Waits for the gather at a place, and drops it, if it was issued and not handed out.
    pub(super) fn free_next(&mut self, place: usize) -> Option<Output> {
        self.end_next(place, |Gather { unit, phase }| Output::Free { place, unit, phase })
    }

    /// Waits for the gather at a place, and ends it by the output that `end` returns.
    fn end_next(&mut self, place: usize, end: impl Fn(Gather) -> Output) -> Option<Output> {
        let gather = self.gather(place);
        let Gather { unit, phase } = gather;
        match self.slots[place] {
            Slot::Issued => Some(Output::Await(Operation::Gather { place, unit, phase })),
            Slot::Arrived => {
                self.slots[place] = Slot::Taken;
                if phase == Phase::Forward {
                    self.last_in_forward = self.last_in_forward.max(Some(place));
                }
                Some(end(gather))
            }
            Slot::Waiting | Slot::Taken => None,
        }
    }

    /// Ends the forward, whose order is known: issues its remaining gathers, whether this rank uses
    /// them or not, since other ranks may wait for them, and drops units that the backward gathers
    /// again.
    pub(super) fn end_forward_next(&mut self, spec: &ModelSpec) -> Option<Output> {
        let units = spec.units().len();
        if let Some(issue) = self.issue_next(units) {
            return Some(issue);
        }
        for place in self.forward_ended..units {
            if let Some(output) = self.free_unless_kept(place, spec) {
                return Some(output);
            }
            self.forward_ended = place + 1;
        }
        None
    }

    /// Drops the gather at a place as [`free_next`](Self::free_next) does, unless the unit is kept.
    pub(super) fn free_unless_kept(&mut self, place: usize, spec: &ModelSpec) -> Option<Output> {
        match spec[self.gather(place).unit].after_forward {
            AfterForward::Keep => None,
            AfterForward::Reshard | AfterForward::Discard => self.free_next(place),
        }
    }

    /// Issues and drops the first `count` gathers, one after the other, except those that were handed
    /// out: other ranks may wait for them, and a peer may still read this rank's shard.
    pub(super) fn finish_next(&mut self, count: usize) -> Option<Output> {
        for place in self.ended..count.min(self.slots.len()) {
            if self.slots[place] == Slot::Taken {
                self.ended = place + 1;
                continue;
            }
            if let Some(output) = self.issue_next(place + 1) {
                return Some(output);
            }
            if let Some(output) = self.free_next(place) {
                return Some(output);
            }
        }
        None
    }

    /// Notes that an operation is complete.
    pub(super) fn complete(&mut self, operation: Operation) {
        if let Operation::Gather { place, .. } = operation
            && self.slots.get(place) == Some(&Slot::Issued)
        {
            self.slots[place] = Slot::Arrived;
        }
    }
}
