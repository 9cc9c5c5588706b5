//! Gathers and reductions as one sequence, where processes compute on devices: each reduction has a place among the gathers, whatever
//! gradients a rank has there. `comm/NCCL.md`, "One order".

use hsdp_sharding::Accumulation;

use crate::error::Error;
use crate::options::Unused;
use crate::state::context::Context;
use crate::state::shard::Shard;
use crate::step::partial::Offer;
use crate::step::place::{Place, Turn};
use crate::step::reductions::Reductions;
use crate::step::step_state::StepState;

impl StepState {
    /// Where gathers and reductions are one sequence: issues the reductions before gather number `end`, and the gathers before them.
    pub(crate) fn reduce_before(
        &mut self,
        context: &Context,
        shards: &[Shard],
        end: usize,
    ) -> Result<(), Error> {
        let place = self.place();
        while let Some(gathers) = self.reductions.gathers_before_next(context, place) {
            if gathers >= end {
                break;
            }
            self.gathers.issue_through(context, shards, gathers - 1)?;
            self.reductions.follow(self.gathers.issued());
            self.reductions.issue_next(context, place)?;
        }
        Ok(())
    }

    /// The same at the end of a microbatch, for all that are left. Gathered units are not used any more.
    pub(crate) fn reduce_rest(&mut self, context: &Context, shards: &[Shard]) -> Result<(), Error> {
        self.gathers.end_finding(context, shards)?;
        let place = self.place();
        while let Some(gathers) = self.reductions.gathers_before_next(context, place) {
            self.gathers.finish_first(context, shards, gathers)?;
            self.reductions.follow(self.gathers.issued());
            self.reductions.issue_next(context, place)?;
        }
        Ok(())
    }
}

impl Reductions {
    /// Where gathers and reductions are one sequence: the number of gathers before the next reduction of this microbatch; `None` behind
    /// the last one.
    pub(super) fn gathers_before_next(&self, context: &Context, place: Place) -> Option<usize> {
        let reduces_later = context.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow;
        if reduces_later || !context.issues_in_one_order() {
            return None;
        }
        let schedule = context.schedules.current();
        match context.options.unused {
            // Gradients of a unit that has unused parameters may come when the backward is over.
            Unused::Zeros => {
                schedule.gathers_before(self.scattered).map(|_| schedule.gathers().len())
            }
            Unused::ErrorInFirstStep | Unused::Warn | Unused::ErrorOnAnyRank => {
                schedule.gathers_before(self.scattered)
            }
        }
    }

    /// So many gathers of this microbatch were issued.
    pub(crate) fn follow(&mut self, gathered: usize) {
        self.gathered = gathered;
    }

    /// Issues the next reduction, whose place has come: of zeros, if its gradients were not offered.
    fn issue_next(&mut self, context: &Context, place: Place) -> Result<(), Error> {
        let unit = context.schedules.current().plan.reductions()[self.scattered];
        let is_missed = matches!(self.offers[unit.index()], Offer::Nothing);
        if is_missed {
            let rest = self.unsharded.take(&context.plan, unit);
            self.offers[unit.index()] = Offer::Waiting(rest);
        }
        self.advance(context, place)?;
        if is_missed {
            self.offers[unit.index()] = Offer::Missed;
        }
        Ok(())
    }
}
