//! The gathers of one microbatch, issued in the plan's order whatever the order in which they are asked for.

mod finding;

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Pending, Stage};
use hsdp_kernels::HostBuffer;
use hsdp_sharding::{AfterForward, FullCopies, Gather, Phase, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::full::Full;
use crate::state::full::device::DeviceArriving;
use crate::state::full_pool::Pooled;
use crate::state::schedule::Schedule;
use crate::state::shard::Shard;

/// One entry of the plan's gather order.
#[derive(Debug)]
enum Slot {
    /// Not issued. Slots before an issued one are never in this state.
    Waiting,
    /// Under way, or complete and not asked for.
    Issued(Arriving),
    /// Handed out, or waited for and dropped.
    Taken,
}

/// A gather that is under way.
#[derive(Debug)]
enum Arriving {
    /// Into buffers of this rank, which go back into the loan.
    Own(Pending<Vec<HostBuffer>>, Pooled),
    /// Into buffers that all ranks read.
    Shared(Pending<Option<Arc<Pooled>>>),
    /// Into a buffer of this rank on a device.
    Device(DeviceArriving),
}

impl Arriving {
    /// Waits for the gather; `None` where an injected fault made this rank skip it.
    fn wait(self, context: &Context, unit: UnitId) -> Result<Option<Full>, Error> {
        let unit = context.unit(unit);
        Ok(match self {
            Self::Own(pending, mut pooled) => {
                pooled.buffers = pending.wait()?;
                Some(Full::own(unit, pooled))
            }
            Self::Shared(pending) => pending.wait()?.map(|shared| Full::shared(unit, shared)),
            Self::Device(arriving) => Some(Full::on_a_device(unit, arriving.wait(context)?)),
        })
    }
}

/// The gathers that a queue makes.
#[derive(Debug, Default)]
enum Purpose {
    /// Those of a microbatch. The first forward finds the order of the model.
    #[default]
    Training,
    /// Those of a forward alone, in the order that the first forward of the evaluation has found, if that of the model is open.
    Evaluation(Option<Arc<Schedule>>),
}

/// The order of the gathers.
#[derive(Debug)]
enum Sequence {
    /// As the plan says.
    Known(Arc<Schedule>),
    /// As the forward goes. There is no gather ahead.
    Finding {
        /// The units so far.
        found: Vec<UnitId>,
        /// Whether they are the first of the declared order, as far as this rank knows. Otherwise all ranks have agreed on them.
        is_declared: bool,
    },
}

impl Default for Sequence {
    fn default() -> Self {
        Self::Finding { found: Vec::new(), is_declared: true }
    }
}

/// The gathers of one microbatch.
#[derive(Debug, Default)]
pub(crate) struct GatherQueue {
    purpose: Purpose,
    step: u64,
    microbatch: usize,
    sequence: Sequence,
    slots: Vec<Slot>,
    /// The number of slots that were issued: all before that index, and none from it on.
    issued: usize,
}

impl GatherQueue {
    /// A queue for the batches of an evaluation.
    pub(crate) fn of_evaluation() -> Self {
        Self { purpose: Purpose::Evaluation(None), ..Self::default() }
    }

    /// Begins a microbatch, when the one before is over.
    pub(crate) fn begin(&mut self, context: &Context, step: u64, microbatch: usize) {
        (self.step, self.microbatch, self.issued) = (step, microbatch, 0);
        self.slots.clear();
        let known = match &self.purpose {
            _ if !context.schedules.is_open() => Some(context.schedules.current()),
            Purpose::Evaluation(found) => found.clone(),
            Purpose::Training => None,
        };
        match known {
            Some(schedule) => self.follow(schedule),
            None => self.sequence = Sequence::default(),
        }
    }

    /// Goes on by a schedule, of which the gathers so far are the first.
    fn follow(&mut self, schedule: Arc<Schedule>) {
        let gathers = match &self.purpose {
            Purpose::Training => schedule.gathers().len(),
            Purpose::Evaluation(_) => schedule.plan.order().len(),
        };
        self.slots.resize_with(gathers, || Slot::Waiting);
        self.sequence = Sequence::Known(schedule);
    }

    /// Waits for the next gather of `unit`, after issuing all before it and those that are prefetched.
    pub(crate) fn take(
        &mut self,
        context: &Context,
        shards: &[Shard],
        unit: UnitId,
    ) -> Result<Full, Error> {
        let index = self.turn_of(context, shards, unit)?;
        self.take_at(context, shards, (index, unit))
    }

    /// The place of the next gather of `unit`.
    pub(crate) fn turn_of(
        &mut self,
        context: &Context,
        shards: &[Shard],
        unit: UnitId,
    ) -> Result<usize, Error> {
        self.find(context, shards, unit)?;
        let index = self.next_of(context, unit)?;
        self.check_order(context, index)?;
        Ok(index)
    }

    /// Waits for the gather at a place, which is one of `unit`, after issuing all before it and those that are prefetched.
    pub(crate) fn take_at(
        &mut self,
        context: &Context,
        shards: &[Shard],
        (index, unit): (usize, UnitId),
    ) -> Result<Full, Error> {
        self.issue_through(context, shards, self.end_of_prefetch(context, index) - 1)?;
        let Slot::Issued(arriving) = mem::replace(&mut self.slots[index], Slot::Taken) else {
            unreachable!("slot {index} was found not taken, and has just been issued");
        };
        let phase = self.gather(index).phase;
        let span = tracing::trace_span!(
            "unshard",
            unit = unit.index(),
            microbatch = self.microbatch,
            ?phase
        );
        let full = span.in_scope(|| arriving.wait(context, unit))?;
        context.events.push(Event::Unshard { unit, microbatch: self.microbatch, phase });
        full.ok_or_else(|| {
            context.misuse(
                "unshard",
                self.step,
                "a fault made this rank skip the gather".to_owned(),
            )
        })
    }

    /// Whether the next gather of `unit` belongs to the backward pass.
    pub(crate) fn next_is_backward(&self, context: &Context, unit: UnitId) -> bool {
        match &self.sequence {
            Sequence::Finding { found, .. } => found.contains(&unit),
            Sequence::Known(_) => self
                .next_of(context, unit)
                .is_ok_and(|index| self.gather(index).phase == Phase::Backward),
        }
    }

    /// Ends the forward pass. Issues its remaining gathers, whether this rank uses them or not, since other ranks may
    /// wait for them. Drops gathered units that this rank did not take and that the backward gathers again.
    pub(crate) fn end_forward(&mut self, context: &Context, shards: &[Shard]) -> Result<(), Error> {
        self.end_finding(context, shards)?;
        let units = context.plan.spec().units().len();
        self.issue_through(context, shards, units - 1)?;
        (0..units).try_for_each(|index| self.discard_unless_kept(context, index))
    }

    /// Drops a gathered unit of the forward that this rank did not take, if the backward gathers it again.
    fn discard_unless_kept(&mut self, context: &Context, index: usize) -> Result<(), Error> {
        let unit = self.gather(index).unit;
        match context.plan.spec()[unit].after_forward {
            AfterForward::Keep => Ok(()),
            _ => self.discard(context, index, unit),
        }
    }

    /// Waits for a gather that was issued and not taken, and gives its buffers back.
    fn discard(&mut self, context: &Context, index: usize, unit: UnitId) -> Result<(), Error> {
        if !matches!(self.slots[index], Slot::Issued(_)) {
            return Ok(());
        }
        if let Slot::Issued(arriving) = mem::replace(&mut self.slots[index], Slot::Taken) {
            drop(arriving.wait(context, unit)?);
        }
        Ok(())
    }

    /// Issues the gathers for which other ranks may still wait, and waits until no peer reads this rank's shard any
    /// more.
    pub(crate) fn finish(&mut self, context: &Context, shards: &[Shard]) -> Result<(), Error> {
        self.end_finding(context, shards)?;
        self.finish_first(context, shards, self.slots.len())
    }

    /// Does so for the first `count` gathers.
    pub(crate) fn finish_first(
        &mut self,
        context: &Context,
        shards: &[Shard],
        count: usize,
    ) -> Result<(), Error> {
        for index in 0..count {
            if matches!(self.slots[index], Slot::Taken) {
                continue;
            }
            self.issue_through(context, shards, index)?;
            self.discard(context, index, self.gather(index).unit)?;
        }
        Ok(())
    }

    /// The number of gathers that are issued, at least, when the one at a place is taken.
    pub(crate) fn end_of_prefetch(&self, context: &Context, index: usize) -> usize {
        let last = index.saturating_add(context.options.prefetch);
        self.slots.len().min(last.saturating_add(1))
    }

    /// The number of gathers that were issued.
    pub(crate) fn issued(&self) -> usize {
        self.issued
    }

    /// The gather at a place of the sequence.
    fn gather(&self, index: usize) -> Gather {
        match &self.sequence {
            Sequence::Known(schedule) => schedule.gathers()[index],
            Sequence::Finding { found, .. } => Gather { unit: found[index], phase: Phase::Forward },
        }
    }

    fn next_of(&self, context: &Context, unit: UnitId) -> Result<usize, Error> {
        let open =
            |index: &usize| self.slots.get(*index).is_some_and(|slot| !matches!(slot, Slot::Taken));
        let next = match &self.sequence {
            Sequence::Known(schedule) => schedule.turns_of(unit).find(open),
            Sequence::Finding { found, .. } => found.iter().position(|it| *it == unit).filter(open),
        };
        if let Some(index) = next {
            return Ok(index);
        }
        let unit = &context.plan.spec()[unit];
        let advice = match unit.after_forward {
            AfterForward::Discard => "a gradient reaches it: do not mark it `forward_only`",
            _ => "hold on to it, or mark it `keep` to use it more than once",
        };
        let what = format!(
            "unit {} has been gathered as often as the plan says for microbatch {}; {advice}",
            unit.name, self.microbatch
        );
        Err(context.misuse("unshard", self.step, what))
    }

    /// Issues the gathers as far as the one at place `last`.
    pub(crate) fn issue_through(
        &mut self,
        context: &Context,
        shards: &[Shard],
        last: usize,
    ) -> Result<(), Error> {
        let end = self.slots.len().min(last.saturating_add(1));
        for index in self.issued..end {
            self.slots[index] = Slot::Issued(self.issue(context, shards, index)?);
            self.issued = index + 1;
        }
        Ok(())
    }

    fn issue(&self, context: &Context, shards: &[Shard], index: usize) -> Result<Arriving, Error> {
        let gather = self.gather(index);
        let tag = context.tag(Some(gather.unit), Stage::Gather, self.step, self.microbatch);
        let event =
            Event::Gather { unit: gather.unit, microbatch: self.microbatch, phase: gather.phase };
        let layout = Arc::clone(context.plan.layout(gather.unit));
        let shard = match &shards[gather.unit.index()] {
            Shard::Host(shard) => shard.gather_input(),
            Shard::Device(shard) => {
                context.events.push(event);
                let arriving = DeviceArriving::issue(context, (tag, layout), shard)?;
                return Ok(Arriving::Device(arriving));
            }
        };
        let no_memory = |error| context.no_memory(error, "gather", (self.step, gather.unit));
        let compute = context.plan.compute_dtype(gather.unit);
        let lend = || context.full_pool.lend(compute, lens(context, gather.unit));
        match context.options.full_copies {
            FullCopies::PerRank => {
                let mut pooled = lend().map_err(no_memory)?;
                context.events.push(event);
                let targets = mem::take(&mut pooled.buffers);
                let pending = context.gather.gather_unit(tag, layout, shard, targets)?;
                Ok(Arriving::Own(pending, pooled))
            }
            FullCopies::PerProcess => {
                let lend = || lend().map(Arc::new);
                let holder =
                    (context.gather.index() == 0).then(lend).transpose().map_err(no_memory)?;
                context.events.push(event);
                let pending = context.gather.gather_unit_shared(tag, layout, shard, holder)?;
                Ok(Arriving::Shared(pending))
            }
        }
    }
}

/// The number of elements of each parameter of a unit.
fn lens(context: &Context, unit: UnitId) -> impl Iterator<Item = usize> + Clone {
    context.plan.layout(unit).params().iter().map(|slot| slot.len)
}
