//! The first forward: as declared at first, and from the first unit that is not, the ranks agree on each unit before they gather it.
//! PROTOCOL.md, "The order of units".

use std::mem;
use std::sync::Arc;

use hsdp_comm::Stage;
use hsdp_sharding::step::{NextUnit, UnitUse};
use hsdp_sharding::{Phase, Rank, UnitId};

use super::{GatherQueue, Purpose, Sequence, Slot};
use crate::agree::unit_use;
use crate::error::Error;
use crate::options::UnitOrder;
use crate::state::context::Context;
use crate::state::schedule::Schedule;
use crate::state::shard::Shard;

impl GatherQueue {
    /// Where the order of the units is being found: agrees with the other ranks on `unit` as the next one, if it is not the next one
    /// as declared. A second use of a unit belongs to the backward, and ends the finding.
    pub(super) fn find(
        &mut self,
        context: &Context,
        shards: &[Shard],
        unit: UnitId,
    ) -> Result<(), Error> {
        let Sequence::Finding { found, is_declared } = &self.sequence else { return Ok(()) };
        if found.contains(&unit) {
            return self.end_finding(context, shards);
        }
        if *is_declared && context.plan.order()[found.len()] == unit {
            self.add(unit);
            return Ok(());
        }
        self.agree(context, shards, UnitUse::Needs(unit)).map(drop)
    }

    /// Ends the forward of this rank, where the order of the units is being found. A rank that has used no unit gathers along with
    /// the others.
    pub(crate) fn end_finding(&mut self, context: &Context, shards: &[Shard]) -> Result<(), Error> {
        let Sequence::Finding { found, .. } = &self.sequence else { return Ok(()) };
        let said = if found.is_empty() { UnitUse::Follows } else { UnitUse::Ends };
        while let Some(unit) = self.agree(context, shards, said)? {
            let index = self.slots.len() - 1;
            self.issue_through(context, shards, index)?;
            self.discard(context, index, unit)?;
        }
        Ok(())
    }

    /// Exchanges records. Returns the next unit; `None` where the order is found, or the declared one stays.
    fn agree(
        &mut self,
        context: &Context,
        shards: &[Shard],
        said: UnitUse,
    ) -> Result<Option<UnitId>, Error> {
        let place = self.slots.len();
        self.gather_as_declared(context, shards)?;
        let tag = context.tag(None, Stage::Header, self.step, self.microbatch);
        let decide = |said: &[u64]| unit_use::decide(said, context.plan.order(), context.rank());
        let (place, next) =
            context.control.exchange_in_step(tag, unit_use::encode(said, place), decide)??;
        match next {
            NextUnit::Gather(unit) => {
                self.go_back_to(context, place)?;
                self.add(unit);
                return Ok(Some(unit));
            }
            NextUnit::Over => {
                let found = self.end_of_finding(context);
                self.keep(context, &found);
            }
            NextUnit::Nothing => drop(self.end_of_finding(context)),
            NextUnit::Differ(ranks) => {
                self.go_back_to(context, place)?;
                self.end_of_finding(context);
                self.keep(context, context.schedules.declared());
                if let Purpose::Training = self.purpose {
                    self.warn(context, ranks);
                }
            }
        }
        Ok(None)
    }

    /// Before the first exchange: makes the other gathers of the forward in the declared order. Other ranks may wait in them, and come
    /// to the exchange after them.
    fn gather_as_declared(&mut self, context: &Context, shards: &[Shard]) -> Result<(), Error> {
        let Sequence::Finding { is_declared: true, .. } = &self.sequence else { return Ok(()) };
        for index in self.slots.len()..context.plan.order().len() {
            self.add(context.plan.order()[index]);
            self.issue_through(context, shards, index)?;
            self.discard_unless_kept(context, index)?;
        }
        Ok(())
    }

    /// After the first exchange, in which a rank has left the declared order after `place` units: what was gathered beyond is gathered
    /// again.
    fn go_back_to(&mut self, context: &Context, place: usize) -> Result<(), Error> {
        for index in place..self.slots.len() {
            self.discard(context, index, self.gather(index).unit)?;
        }
        self.slots.truncate(place);
        self.issued = self.issued.min(place);
        if let Sequence::Finding { found, is_declared } = &mut self.sequence {
            found.truncate(place);
            *is_declared = false;
        }
        Ok(())
    }

    /// Keeps a schedule: for the model, or for the rest of the evaluation.
    fn keep(&mut self, context: &Context, schedule: &Arc<Schedule>) {
        match &mut self.purpose {
            Purpose::Training => {
                context.schedules.find(schedule);
                context.full_pool.set_limit(schedule.plan.memory().full);
            }
            Purpose::Evaluation(found) => *found = Some(Arc::clone(schedule)),
        }
    }

    fn add(&mut self, unit: UnitId) {
        if let Sequence::Finding { found, .. } = &mut self.sequence {
            found.push(unit);
            self.slots.push(Slot::Waiting);
        }
    }

    /// Goes on with the units that were not used so far, in the declared order.
    fn end_of_finding(&mut self, context: &Context) -> Arc<Schedule> {
        let Sequence::Finding { found, .. } = &mut self.sequence else {
            unreachable!("an order is found where it is not known");
        };
        let mut order = mem::take(found);
        let rest = context.plan.spec().unit_ids().filter(|unit| !order.contains(unit));
        let rest: Vec<UnitId> = rest.collect();
        order.extend(rest);
        let schedule = context.schedules.of(&order);
        self.follow(Arc::clone(&schedule));
        schedule
    }

    /// Warns, on one rank, that the declared order stays.
    fn warn(&self, context: &Context, [(one, first), (other, second)]: [(Rank, UnitUse); 2]) {
        if context.rank().index() > 0 {
            return;
        }
        let spec = context.plan.spec();
        hsdp_warnings::warn!(
            step = self.step,
            "ranks use the units of the model in different orders: rank {one} {}, rank {other} {}; the gathers stay in the declared \
             order, and may need more memory than planned",
            unit_use::in_words(first, spec),
            unit_use::in_words(second, spec)
        );
    }

    /// Refuses a unit of the forward behind which another one was used, if the options say so.
    pub(super) fn check_order(&self, context: &Context, index: usize) -> Result<(), Error> {
        let gather = self.gather(index);
        if context.options.order == UnitOrder::Follow || gather.phase == Phase::Backward {
            return Ok(());
        }
        let forward = index + 1..context.plan.spec().units().len();
        let Some(later) = forward.rev().find(|at| matches!(self.slots[*at], Slot::Taken)) else {
            return Ok(());
        };
        let name = |unit: UnitId| &context.plan.spec()[unit].name;
        let what = format!(
            "unit {} is used after unit {}, which is declared behind it: declare the units in the order of the forward, or choose \
             UnitOrder::Follow",
            name(gather.unit),
            name(self.gather(later).unit)
        );
        Err(context.misuse("unshard", self.step, what))
    }
}
