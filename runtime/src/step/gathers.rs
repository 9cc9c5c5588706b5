//! The gathers of a microbatch that are under way, by their places in its sequence of gathers.

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Pending, Stage};
use hsdp_kernels::HostBuffer;
use hsdp_sharding::{FullCopies, Phase, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::full::Full;
use crate::state::full::device::DeviceArriving;
use crate::state::full_pool::Pooled;
use crate::state::shard::Shard;
use crate::step::place::Place;

/// One place in the sequence of gathers.
#[derive(Debug)]
enum Slot {
    /// No gather is under way here.
    Vacant,
    /// The gather is under way.
    Arriving(Arriving),
    /// The gather is complete; `None` where an injected fault made this rank skip it.
    Arrived(Option<Full>),
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

/// The gathers that are under way. The machine of the step decides on each, and on their order.
#[derive(Debug, Default)]
pub(crate) struct Gathers(Vec<Slot>);

impl Gathers {
    /// Issues a gather of this rank's shard of a unit.
    pub(crate) fn issue(
        &mut self,
        context: &Context,
        at: Place,
        shard: &Shard,
        gather: Gather,
    ) -> Result<(), Error> {
        let arriving = issue(context, at, shard, gather)?;
        if self.0.len() <= gather.place {
            self.0.resize_with(gather.place + 1, || Slot::Vacant);
        }
        self.0[gather.place] = Slot::Arriving(arriving);
        Ok(())
    }

    /// Waits for a gather.
    pub(crate) fn wait(
        &mut self,
        context: &Context,
        at: Place,
        gather: Gather,
    ) -> Result<(), Error> {
        let Gather { place, unit, phase } = gather;
        let slot = &mut self.0[place];
        let Slot::Arriving(arriving) = mem::replace(slot, Slot::Vacant) else {
            unreachable!("the machine waits for gathers that are under way: {place}");
        };
        let microbatch = at.microbatch;
        let span = tracing::trace_span!("unshard", unit = unit.index(), microbatch, ?phase);
        *slot = Slot::Arrived(span.in_scope(|| arriving.wait(context, unit))?);
        Ok(())
    }

    /// Takes the unit that a gather has brought.
    ///
    /// # Errors
    /// [`Error::Misuse`] if an injected fault made this rank skip the gather.
    pub(crate) fn hand(
        &mut self,
        context: &Context,
        at: Place,
        gather: Gather,
    ) -> Result<Full, Error> {
        let Gather { unit, phase, .. } = gather;
        context.events.push(Event::Unshard { unit, microbatch: at.microbatch, phase });
        self.take(gather.place).ok_or_else(|| {
            let what = "a fault made this rank skip the gather".to_owned();
            context.misuse("unshard", at.step, what)
        })
    }

    /// Drops the unit that a gather has brought.
    pub(crate) fn free(&mut self, place: usize) {
        drop(self.take(place));
    }

    fn take(&mut self, place: usize) -> Option<Full> {
        match mem::replace(&mut self.0[place], Slot::Vacant) {
            Slot::Arrived(full) => full,
            Slot::Vacant | Slot::Arriving(_) => {
                unreachable!("the machine waits for a gather before it is used: {place}")
            }
        }
    }
}

/// A gather in a microbatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gather {
    /// Place in the microbatch's sequence of gathers.
    pub(crate) place: usize,
    pub(crate) unit: UnitId,
    pub(crate) phase: Phase,
}

fn issue(context: &Context, at: Place, shard: &Shard, gather: Gather) -> Result<Arriving, Error> {
    let Gather { unit, phase, .. } = gather;
    let tag = context.tag(Some(unit), Stage::Gather, at.step, at.microbatch);
    let event = Event::Gather { unit, microbatch: at.microbatch, phase };
    let layout = Arc::clone(context.plan.layout(unit));
    let shard = match shard {
        Shard::Host(shard) => shard.gather_input(),
        Shard::Device(shard) => {
            context.events.push(event);
            return Ok(Arriving::Device(DeviceArriving::issue(context, (tag, layout), shard)?));
        }
    };
    let no_memory = |error| context.site("gather", at.step).memory(unit, error);
    let compute = context.plan.compute_dtype(unit);
    let lens = context.plan.layout(unit).params().iter().map(|slot| slot.len);
    let lend = || context.full_pool.lend(compute, lens);
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
            let holder = (context.gather.index() == 0).then(lend).transpose().map_err(no_memory)?;
            context.events.push(event);
            let pending = context.gather.gather_unit_shared(tag, layout, shard, holder)?;
            Ok(Arriving::Shared(pending))
        }
    }
}
