//! The gathers of a microbatch that are under way, by their places in its sequence of gathers.

use std::mem;

use hsdp_sharding::{Phase, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::full::{Arriving, Full};
use crate::state::shard::Shard;
use crate::step::reductions::StepPlace;

/// One place in the sequence of gathers.
#[derive(Debug)]
enum GatherSlot {
    /// No gather is under way here.
    Vacant,
    /// The gather is under way.
    Arriving(Arriving),
    /// The gather is complete; `None` where an injected fault made this rank skip it.
    Arrived(Option<Full>),
}

/// The gathers that are under way. The machine of the step decides on each, and on their order.
#[derive(Debug, Default)]
pub(crate) struct UnitGathers(Vec<GatherSlot>);

impl UnitGathers {
    /// Issues a gather of this rank's shard of a unit.
    pub(crate) fn issue(
        &mut self,
        context: &Context,
        at: StepPlace,
        shard: &Shard,
        place: usize,
        unit: UnitId,
        phase: Phase,
    ) -> Result<(), Error> {
        let arriving = Arriving::issue(context, at.step, at.microbatch, unit, phase, shard)?;
        if self.0.len() <= place {
            self.0.resize_with(place + 1, || GatherSlot::Vacant);
        }
        self.0[place] = GatherSlot::Arriving(arriving);
        Ok(())
    }

    /// Waits for a gather.
    pub(crate) fn wait(
        &mut self,
        context: &Context,
        at: StepPlace,
        place: usize,
        unit: UnitId,
        phase: Phase,
    ) -> Result<(), Error> {
        let slot = &mut self.0[place];
        let GatherSlot::Arriving(arriving) = mem::replace(slot, GatherSlot::Vacant) else {
            unreachable!("the machine waits for gathers that are under way: {place}");
        };
        let microbatch = at.microbatch;
        let span = tracing::trace_span!("unshard", unit = unit.index(), microbatch, ?phase);
        *slot = GatherSlot::Arrived(span.in_scope(|| arriving.wait(context, unit))?);
        Ok(())
    }

    /// Takes the unit that a gather has brought.
    ///
    /// # Errors
    /// [`Error::Misuse`] if an injected fault made this rank skip the gather.
    pub(crate) fn hand(
        &mut self,
        context: &Context,
        at: StepPlace,
        place: usize,
        unit: UnitId,
        phase: Phase,
    ) -> Result<Full, Error> {
        context.events.push(Event::Unshard { unit, microbatch: at.microbatch, phase });
        self.take(place).ok_or_else(|| {
            let what = "a fault made this rank skip the gather".to_owned();
            context.misuse("unshard", at.step, what)
        })
    }

    /// Drops the unit that a gather has brought.
    pub(crate) fn free(&mut self, place: usize) {
        drop(self.take(place));
    }

    fn take(&mut self, place: usize) -> Option<Full> {
        match mem::replace(&mut self.0[place], GatherSlot::Vacant) {
            GatherSlot::Arrived(full) => full,
            GatherSlot::Vacant | GatherSlot::Arriving(_) => {
                unreachable!("the machine waits for a gather before it is used: {place}")
            }
        }
    }
}
