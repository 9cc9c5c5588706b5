//! The gathers of a microbatch: each is issued when it, or one a few places before it, is needed.

use hsdp_sharding::{AfterForward, Gather, Phase, UnitId};

use super::writer::Writer;

/// The gathers of a microbatch so far.
#[derive(Default)]
pub(super) struct Gathers {
    /// By place in the plan's order: the index of the operation, for those that were issued.
    issued: Vec<usize>,
    /// By place: whether the gather was needed.
    needed: Vec<bool>,
    /// The place of the next gather for the backward.
    next_backward: usize,
}

impl Gathers {
    pub(super) fn new(writer: &Writer<'_>) -> Self {
        let gathers = writer.plan.gathers().len();
        let next_backward = writer.plan.order().len();
        Self { issued: Vec::new(), needed: vec![false; gathers], next_backward }
    }
}

impl Writer<'_> {
    /// Needs the gather at a place, after issuing those up to it and those that are prefetched.
    pub(super) fn unshard(&mut self, gathers: &mut Gathers, place: usize) {
        let end = self.end_of_prefetch(place);
        self.gather_through(gathers, end);
        self.need_gather(gathers, place);
    }

    /// Needs the gather of a unit for its backward, if there is one.
    pub(super) fn unshard_again(&mut self, gathers: &mut Gathers, unit: UnitId) {
        let place = gathers.next_backward;
        if self.plan.gathers().get(place) == Some(&Gather { unit, phase: Phase::Backward }) {
            gathers.next_backward += 1;
            self.unshard(gathers, place);
        }
    }

    /// Issues all gathers of the forward, and needs those that the backward has again: a rank without data does so.
    pub(super) fn end_forward(&mut self, gathers: &mut Gathers) {
        let forward = self.plan.order().len();
        self.gather_through(gathers, forward);
        for place in 0..forward {
            let unit = self.plan.order()[place];
            if self.plan.spec()[unit].after_forward != AfterForward::Keep {
                self.need_gather(gathers, place);
            }
        }
    }

    /// Issues and needs the first gathers, one after the other, that were not needed yet.
    pub(super) fn finish_gathers(&mut self, gathers: &mut Gathers, count: usize) {
        for place in 0..count {
            if !gathers.needed[place] {
                self.gather_through(gathers, place + 1);
                self.need_gather(gathers, place);
            }
        }
    }

    /// The number of gathers that are issued, at least, when the one at a place is needed.
    fn end_of_prefetch(&self, place: usize) -> usize {
        let end = place.saturating_add(self.plan.options().prefetch).saturating_add(1);
        end.min(self.plan.gathers().len())
    }

    fn gather_through(&mut self, gathers: &mut Gathers, end: usize) {
        for place in gathers.issued.len()..end {
            gathers.issued.push(self.gather(self.plan.gathers()[place]));
        }
    }

    fn need_gather(&mut self, gathers: &mut Gathers, place: usize) {
        gathers.needed[place] = true;
        self.need(gathers.issued[place]);
    }
}
