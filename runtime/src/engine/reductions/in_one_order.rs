//! Gathers and reductions as one sequence, where processes compute on devices: each reduction has a place among the gathers, whatever
//! gradients a rank has there. `comm/NCCL.md`, "One order".

use hsdp_sharding::Accumulation;

use crate::engine::fabric::Fabric;
use crate::engine::partial::Offer;
use crate::engine::place::{Place, Turn};
use crate::engine::reductions::Reductions;
use crate::engine::shard::Shard;
use crate::engine::step_state::StepState;
use crate::error::Error;
use crate::options::Unused;

impl StepState {
    /// Where gathers and reductions are one sequence: issues the reductions before gather number `end`, and the gathers before them.
    pub(crate) fn reduce_before(
        &mut self,
        fabric: &Fabric,
        shards: &[Shard],
        end: usize,
    ) -> Result<(), Error> {
        let place = self.place();
        while let Some(gathers) = self.reductions.gathers_before_next(fabric, place) {
            if gathers >= end {
                break;
            }
            self.gathers.issue_through(fabric, shards, gathers - 1)?;
            self.reductions.follow(self.gathers.issued());
            self.reductions.issue_next(fabric, place)?;
        }
        Ok(())
    }

    /// The same at the end of a microbatch, for all that are left. Gathered units are not used any more.
    pub(crate) fn reduce_rest(&mut self, fabric: &Fabric, shards: &[Shard]) -> Result<(), Error> {
        self.gathers.end_finding(fabric, shards)?;
        let place = self.place();
        while let Some(gathers) = self.reductions.gathers_before_next(fabric, place) {
            self.gathers.finish_first(fabric, shards, gathers)?;
            self.reductions.follow(self.gathers.issued());
            self.reductions.issue_next(fabric, place)?;
        }
        Ok(())
    }
}

impl Reductions {
    /// Where gathers and reductions are one sequence: the number of gathers before the next reduction of this microbatch; `None` behind
    /// the last one.
    pub(super) fn gathers_before_next(&self, fabric: &Fabric, place: Place) -> Option<usize> {
        let reduces_later = fabric.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow;
        if reduces_later || !fabric.issues_in_one_order() {
            return None;
        }
        let schedule = fabric.schedules.current();
        match fabric.options.unused {
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
    fn issue_next(&mut self, fabric: &Fabric, place: Place) -> Result<(), Error> {
        let unit = fabric.schedules.current().plan.reductions()[self.scattered];
        let is_missed = matches!(self.offers[unit.index()], Offer::Nothing);
        if is_missed {
            let rest = self.unsharded.take(&fabric.plan, unit);
            self.offers[unit.index()] = Offer::Waiting(rest);
        }
        self.advance(fabric, place)?;
        if is_missed {
            self.offers[unit.index()] = Offer::Missed;
        }
        Ok(())
    }
}
