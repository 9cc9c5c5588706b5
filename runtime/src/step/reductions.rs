//! The sums of one step's gradients, by unit, and the reductions that are under way on them.

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Contribution, NonFiniteAt, Stage};
use hsdp_kernels::Fold;
use hsdp_sharding::step::{Source, Target};
use hsdp_sharding::{ParamId, Plan, Rank, UnitId};

use crate::error::Error;
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::sighting::{Sighting, When};
use crate::state::sums::{AllReducing, Scattered, Scattering, Sums};
use crate::step::place::{Place, scaling_of_all_reduce, scaling_of_reduce_scatter};
use crate::step::unit_gradients::UnitGradients;
use crate::step::unsharded::Unsharded;

/// The sums of a model's units, which the steps use one after the other. The machine of the step
/// decides on each reduction, and on their order.
#[derive(Debug)]
pub(crate) struct Reductions {
    /// Sums by unit; those of a unit without a trainable parameter stay empty.
    units: Vec<UnitSums>,
    /// The sums of microbatches before they are reduced.
    unsharded: Unsharded,
    /// The first element of this rank's sums that was found not to be finite in the step.
    sighting: Option<Sighting>,
}

/// The sums of one unit.
#[derive(Debug, Default)]
struct UnitSums {
    /// The gradients of the microbatch, until their turn.
    offered: Option<UnitGradients>,
    /// The partial: the sum over microbatches.
    partial: Buffer,
    /// The sums of the microbatch alone, from their reduce-scatter until they are added to the
    /// partial.
    microbatch: Option<Buffer>,
    /// The buffer of the sums of the microbatch before.
    spare: Sums,
}

/// A buffer of sums, and the reduction that is under way on it.
#[derive(Debug)]
enum Buffer {
    /// A buffer without sums of this step: new, or one of the step before.
    Empty(Sums),
    /// Sums that no collective uses.
    Held(Sums),
    /// A reduce-scatter adds to it.
    Scattering { pending: Scattering, microbatch: usize },
    /// An all-reduce is under way.
    AllReducing(AllReducing),
}

/// An empty buffer, which holds no memory.
impl Default for Buffer {
    fn default() -> Self {
        Self::Empty(Sums::default())
    }
}

impl Buffer {
    /// Takes the sums, on which nothing is under way, and the fold of what comes to them next.
    fn take(&mut self) -> (Sums, Fold) {
        match mem::take(self) {
            Self::Empty(sums) => (sums, Fold::Replace),
            Self::Held(sums) => (sums, Fold::Add),
            Self::Scattering { .. } | Self::AllReducing(_) => {
                unreachable!("the machine waits for an operation before the next one on a buffer")
            }
        }
    }

    /// Returns the sums, if nothing is under way and something was added to them.
    fn held(&self) -> Option<&Sums> {
        match self {
            Self::Held(sums) => Some(sums),
            Self::Empty(_) | Self::Scattering { .. } | Self::AllReducing(_) => None,
        }
    }
}

impl UnitSums {
    /// Returns the buffer that is reduced now.
    fn reduced(&mut self) -> &mut Buffer {
        self.microbatch.as_mut().unwrap_or(&mut self.partial)
    }
}

impl Reductions {
    /// Makes the sums of a model, of no step yet.
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            units: plan.spec().units().iter().map(|_| UnitSums::default()).collect(),
            unsharded: Unsharded::new(plan),
            sighting: None,
        }
    }

    /// Begins a step, whose partials use the buffers `sums` of a step before.
    pub(crate) fn begin(&mut self, context: &Context, sums: Vec<Sums>) {
        for (unit, sums) in self.units.iter_mut().zip(sums) {
            unit.partial = Buffer::Empty(sums);
        }
        self.sighting = None;
        self.unsharded.begin(context);
    }

    /// Takes a unit's gradients of the microbatch, to be accumulated or reduced.
    pub(crate) fn offer(&mut self, unit: UnitId, gradients: UnitGradients) {
        self.units[unit.index()].offered = Some(gradients);
    }

    /// Adds the offered gradients of a unit to the unsharded sums.
    pub(crate) fn accumulate(
        &mut self,
        context: &Context,
        at: Place,
        unit: UnitId,
    ) -> Result<(), Error> {
        let gradients = self.take_offered(unit);
        if let Some(non_finite) = self.unsharded.add(context, at, (unit, &gradients))? {
            self.note(context, unit, at.microbatch, non_finite);
        }
        Ok(())
    }

    /// Issues the reduce-scatter of a unit.
    pub(crate) fn reduce_scatter(
        &mut self,
        context: &Context,
        at: Place,
        unit: UnitId,
        from: Source,
        into: Target,
    ) -> Result<(), Error> {
        let (gradients, summed) = match from {
            Source::Offered => (self.take_offered(unit), 1),
            Source::Zeros => (context.plan.layout(unit).params().iter().map(|_| None).collect(), 1),
            Source::Accumulated => (self.unsharded.take(&context.plan, unit), at.microbatches()),
        };
        let of_unit = &mut self.units[unit.index()];
        let ((sums, fold), is_first) = match into {
            Target::NewPartial => (of_unit.partial.take(), true),
            Target::Partial => (of_unit.partial.take(), false),
            Target::Microbatch => {
                let is_first = matches!(of_unit.partial, Buffer::Empty(_));
                ((mem::take(&mut of_unit.spare), Fold::Replace), is_first)
            }
        };
        let len = context.plan.layout(unit).trainable().shard_len;
        let mut sums = sums.sized(context, len, (at.step, unit))?;
        if is_first {
            sums.begin(context, at.step)?;
        }
        context.events.push(Event::ReduceScatter { unit, microbatch: at.microbatch });
        let contribution = Contribution {
            gradients: gradients.entries,
            scaling: scaling_of_reduce_scatter(context, summed)?,
        };
        let tag = context.tag(Some(unit), Stage::Reduce, at.step, at.microbatch);
        let layout = Arc::clone(context.plan.layout(unit));
        let pending = sums.scatter(context, (tag, layout), contribution, fold)?;
        let scattering = Buffer::Scattering { pending, microbatch: at.microbatch };
        match into {
            Target::NewPartial | Target::Partial => of_unit.partial = scattering,
            Target::Microbatch => of_unit.microbatch = Some(scattering),
        }
        Ok(())
    }

    /// Issues the all-reduce of a unit's sums: of those of the microbatch, if they are apart.
    pub(crate) fn all_reduce(
        &mut self,
        context: &Context,
        at: Place,
        unit: UnitId,
    ) -> Result<(), Error> {
        let of_unit = &mut self.units[unit.index()];
        let summed = if of_unit.microbatch.is_some() { 1 } else { at.microbatches() };
        let (sums, _) = of_unit.reduced().take();
        context.events.push(Event::AllReduce { unit, microbatch: at.microbatch });
        let tag = context.tag(Some(unit), Stage::AllReduce, at.step, at.microbatch);
        let pending = sums.all_reduce(context, tag, scaling_of_all_reduce(context, summed)?)?;
        *of_unit.reduced() = Buffer::AllReducing(pending);
        Ok(())
    }

    /// Adds the sums of a unit's microbatch to its partial.
    pub(crate) fn fold(&mut self, context: &Context, at: Place, unit: UnitId) -> Result<(), Error> {
        let of_unit = &mut self.units[unit.index()];
        let Some(mut reduced) = of_unit.microbatch.take() else {
            unreachable!("the machine folds sums of a microbatch that were reduced");
        };
        let (reduced, _) = reduced.take();
        let (partial, fold) = of_unit.partial.take();
        let mut partial = partial.sized(context, reduced.len(), (at.step, unit))?;
        partial.fold_in(context, (&reduced, fold), at.step)?;
        of_unit.partial = Buffer::Held(partial);
        of_unit.spare = reduced;
        Ok(())
    }

    /// Returns whether the reduce-scatter that is under way on a unit's sums is complete.
    pub(crate) fn is_scattered(&mut self, unit: UnitId) -> bool {
        match self.units[unit.index()].reduced() {
            Buffer::Scattering { pending, .. } => pending.is_complete(),
            Buffer::Empty(_) | Buffer::Held(_) | Buffer::AllReducing(_) => false,
        }
    }

    /// Waits for the reduction that is under way on a unit's sums.
    pub(crate) fn wait(&mut self, context: &Context, unit: UnitId) -> Result<(), Error> {
        let buffer = self.units[unit.index()].reduced();
        match mem::take(buffer) {
            Buffer::Scattering { pending, microbatch } => {
                let Scattered { sums, non_finite } = pending.wait()?;
                *buffer = Buffer::Held(sums);
                if let Some(non_finite) = non_finite {
                    self.note(context, unit, microbatch, non_finite);
                }
            }
            Buffer::AllReducing(pending) => *buffer = Buffer::Held(pending.wait()?),
            Buffer::Empty(_) | Buffer::Held(_) => {
                unreachable!("the machine waits for reductions that are under way: {unit}")
            }
        }
        Ok(())
    }

    /// Takes the sums of the step, by unit, when nothing is under way: empty for units without any.
    pub(crate) fn take_sums(&mut self) -> Vec<Sums> {
        self.units.iter_mut().map(|unit| unit.partial.take().0).collect()
    }

    /// Returns the first element of this rank's sums so far that is not finite. Waits for the notes
    /// of a device.
    pub(crate) fn sighting(&self, context: &Context, step: u64) -> Result<Option<Sighting>, Error> {
        let held = self.units.iter().map(|unit| unit.partial.held());
        self.with_noted(context, step, held)
    }

    /// Does as [`sighting`](Self::sighting) at the end of the step, whose sums were taken.
    pub(crate) fn sighting_of_step(
        &self,
        context: &Context,
        step: u64,
        sums: &[Sums],
    ) -> Result<Option<Sighting>, Error> {
        self.with_noted(context, step, sums.iter().map(Some))
    }

    /// Returns the first of the sighting that is known here and of those that a device has noted:
    /// in `sums`, by unit, in the buffers of microbatches, and in unsharded sums.
    fn with_noted<'a>(
        &'a self,
        context: &Context,
        step: u64,
        sums: impl Iterator<Item = Option<&'a Sums>>,
    ) -> Result<Option<Sighting>, Error> {
        let spares = self.units.iter().map(|unit| Some(&unit.spare)).enumerate();
        let noting = sums.enumerate().chain(spares);
        let noting = noting.filter_map(|(unit, sums)| Some((UnitId::new(unit), sums?)));
        let noted = Sums::sighting(context, noting, step)?;
        let unsharded = self.unsharded.sighting(context, step)?;
        Ok([self.sighting, noted, unsharded].into_iter().flatten().min())
    }

    fn take_offered(&mut self, unit: UnitId) -> UnitGradients {
        self.units[unit.index()].offered.take().expect("the machine takes what was offered")
    }

    /// Keeps a sighting if it is the first.
    fn note(&mut self, context: &Context, unit: UnitId, microbatch: usize, found: NonFiniteAt) {
        let parameter = context.number_of(ParamId { unit, index: found.param });
        let (when, from) = (When::Microbatch(microbatch), found.from.map(Rank::index));
        let sighting = Sighting { when, parameter, from };
        self.sighting = Some(self.sighting.map_or(sighting, |first| first.min(sighting)));
    }
}
