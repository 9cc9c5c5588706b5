//! The sums of one step's gradients, by unit, the reductions that are under way on them, and how
//! these divide.

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Contribution, NonFiniteAt, Scaling, Stage};
use hsdp_kernels::{Divisor, Fold, Wire};
use hsdp_sharding::step::{Source, Target};
use hsdp_sharding::{ParamId, Rank, UnitId};

use crate::error::Error;
use crate::options::divide::{DividePlan, Divides, Parties};
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::gradients::{UnitGradients, Unsharded};
use crate::state::sighting::{Sighting, When};
use crate::state::sums::{GradientSums, SumsUnderWay};

/// The place of an operation in the run: a step, and a microbatch of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepPlace {
    pub(crate) step: u64,
    pub(crate) microbatch: usize,
}

impl StepPlace {
    /// Returns the number of microbatches so far, with this one.
    pub(crate) fn microbatches(self) -> usize {
        self.microbatch + 1
    }
}

/// The sums of a model's units, which the steps use one after the other. The machine of the step
/// decides on each reduction, and on their order.
#[derive(Debug)]
pub(crate) struct UnitReductions {
    /// Sums by unit; those of a unit without a trainable parameter stay empty.
    units: Vec<UnitSums>,
    /// The sums of microbatches before they are reduced.
    unsharded: Unsharded,
    /// The first element of this rank's sums that was found not to be finite in the step.
    sighting: Option<Sighting>,
}

/// The sums of one unit.
#[derive(Debug)]
struct UnitSums {
    /// The gradients of the microbatch, until their turn.
    offered: Option<UnitGradients>,
    /// The partial: the sum over microbatches.
    partial: UnitBuffer,
    /// The sums of the microbatch alone, from their reduce-scatter until they are added to the
    /// partial.
    microbatch: Option<UnitBuffer>,
    /// The buffer of the sums of the microbatch before.
    spare: GradientSums,
}

/// A buffer of sums, and the reduction that is under way on it.
#[derive(Debug)]
enum UnitBuffer {
    /// A buffer without sums of this step: new, or one of the step before.
    Empty(GradientSums),
    /// Sums that no collective uses.
    Held(GradientSums),
    /// Sums on which a reduction is under way.
    UnderWay { pending: SumsUnderWay, microbatch: usize },
}

impl UnitBuffer {
    /// Returns an empty buffer, which holds no memory.
    fn none() -> Self {
        Self::Empty(GradientSums::none())
    }

    /// Takes the sums, on which nothing is under way, and the fold of what comes to them next.
    fn take(&mut self) -> (GradientSums, Fold) {
        match mem::replace(self, Self::none()) {
            Self::Empty(sums) => (sums, Fold::Replace),
            Self::Held(sums) => (sums, Fold::Add),
            Self::UnderWay { .. } => {
                unreachable!("the machine waits for an operation before the next one on a buffer")
            }
        }
    }

    /// Returns the sums, if nothing is under way and something was added to them.
    fn held(&self) -> Option<&GradientSums> {
        match self {
            Self::Held(sums) => Some(sums),
            Self::Empty(_) | Self::UnderWay { .. } => None,
        }
    }
}

impl UnitSums {
    fn none() -> Self {
        let spare = GradientSums::none();
        Self { offered: None, partial: UnitBuffer::none(), microbatch: None, spare }
    }

    /// Returns the buffer that is reduced now.
    fn reduced(&mut self) -> &mut UnitBuffer {
        self.microbatch.as_mut().unwrap_or(&mut self.partial)
    }
}

impl UnitReductions {
    /// Makes the sums of a model, of no step yet.
    pub(crate) fn new(context: &Context) -> Self {
        Self {
            units: context.plan.spec().units().iter().map(|_| UnitSums::none()).collect(),
            unsharded: Unsharded::new(context),
            sighting: None,
        }
    }

    /// Begins a step, whose partials use the buffers `sums` of a step before.
    pub(crate) fn begin(&mut self, sums: Vec<GradientSums>) {
        for (unit, sums) in self.units.iter_mut().zip(sums) {
            unit.partial = UnitBuffer::Empty(sums);
        }
        self.sighting = None;
        self.unsharded.begin();
    }

    /// Takes a unit's gradients of the microbatch, to be accumulated or reduced.
    pub(crate) fn offer(&mut self, unit: UnitId, gradients: UnitGradients) {
        self.units[unit.index()].offered = Some(gradients);
    }

    /// Adds the offered gradients of a unit to the unsharded sums.
    pub(crate) fn accumulate(
        &mut self,
        context: &Context,
        at: StepPlace,
        unit: UnitId,
    ) -> Result<(), Error> {
        let gradients = self.take_offered(unit);
        let site = context.site("accumulation", at.step);
        let added = self.unsharded.add(site, unit, at.microbatch, &gradients)?;
        if let Some(non_finite) = added {
            self.note(context, unit, at.microbatch, non_finite);
        }
        Ok(())
    }

    /// Issues the reduce-scatter of a unit.
    pub(crate) fn reduce_scatter(
        &mut self,
        context: &Context,
        at: StepPlace,
        unit: UnitId,
        from: Source,
        into: Target,
    ) -> Result<(), Error> {
        let (gradients, summed) = match from {
            Source::Offered => (self.take_offered(unit), 1),
            Source::Zeros => (context.plan.layout(unit).params().iter().map(|_| None).collect(), 1),
            Source::Accumulated => {
                (self.unsharded.take(context.plan.layout(unit), unit), at.microbatches())
            }
        };
        let of_unit = &mut self.units[unit.index()];
        let ((sums, fold), is_first) = match into {
            Target::NewPartial => (of_unit.partial.take(), true),
            Target::Partial => (of_unit.partial.take(), false),
            Target::Microbatch => {
                let is_first = matches!(of_unit.partial, UnitBuffer::Empty(_));
                ((mem::replace(&mut of_unit.spare, GradientSums::none()), Fold::Replace), is_first)
            }
        };
        let len = context.plan.layout(unit).trainable().shard_len;
        let site = context.site("reduction", at.step);
        let mut sums = sums.sized(site, unit, len)?;
        if is_first {
            sums.begin().map_err(|error| site.device(error))?;
        }
        context.events.push(Event::ReduceScatter { unit, microbatch: at.microbatch });
        let contribution = Contribution {
            gradients: gradients.entries,
            scaling: scaling_of_reduce_scatter(context, summed)?,
        };
        let tag = context.tag(Some(unit), Stage::Reduce, at.step, at.microbatch);
        let layout = Arc::clone(context.plan.layout(unit));
        let pending = sums.scatter(context, tag, layout, contribution, fold)?;
        let scattering = UnitBuffer::UnderWay { pending, microbatch: at.microbatch };
        match into {
            Target::NewPartial | Target::Partial => of_unit.partial = scattering,
            Target::Microbatch => of_unit.microbatch = Some(scattering),
        }
        Ok(())
    }

    /// Issues the all-reduce of a unit's sums, or their reduce-scatter over the replicas: of those
    /// of the microbatch, if they are apart.
    pub(crate) fn reduce_over_replicas(
        &mut self,
        context: &Context,
        at: StepPlace,
        unit: UnitId,
    ) -> Result<(), Error> {
        let of_unit = &mut self.units[unit.index()];
        let summed = if of_unit.microbatch.is_some() { 1 } else { at.microbatches() };
        let (sums, _) = of_unit.reduced().take();
        let StepPlace { step, microbatch } = at;
        let scaling = scaling_over_replicas(context, summed)?;
        let pending = if context.plan.divides_state() {
            context.events.push(Event::ScatterSums { unit, microbatch });
            let tag = context.tag(Some(unit), Stage::ScatterSums, step, microbatch);
            sums.scatter_over_replicas(context, tag, unit, scaling)?
        } else {
            context.events.push(Event::AllReduce { unit, microbatch });
            let tag = context.tag(Some(unit), Stage::AllReduce, step, microbatch);
            sums.all_reduce(context, tag, scaling)?
        };
        *of_unit.reduced() = UnitBuffer::UnderWay { pending, microbatch };
        Ok(())
    }

    /// Adds the sums of a unit's microbatch to its partial.
    pub(crate) fn fold(
        &mut self,
        context: &Context,
        at: StepPlace,
        unit: UnitId,
    ) -> Result<(), Error> {
        let of_unit = &mut self.units[unit.index()];
        let Some(mut reduced) = of_unit.microbatch.take() else {
            unreachable!("the machine folds sums of a microbatch that were reduced");
        };
        let (reduced, _) = reduced.take();
        let (partial, fold) = of_unit.partial.take();
        let site = context.site("reduction", at.step);
        let mut partial = partial.sized(site, unit, reduced.len())?;
        let range = context.updated(unit);
        partial.fold_in(&reduced, range, fold).map_err(|error| site.device(error))?;
        of_unit.partial = UnitBuffer::Held(partial);
        of_unit.spare = reduced;
        Ok(())
    }

    /// Returns whether the reduce-scatter that is under way on a unit's sums is complete.
    pub(crate) fn is_scattered(&mut self, unit: UnitId) -> bool {
        match self.units[unit.index()].reduced() {
            UnitBuffer::UnderWay { pending, .. } => pending.is_scattered(),
            UnitBuffer::Empty(_) | UnitBuffer::Held(_) => false,
        }
    }

    /// Waits for the reduction that is under way on a unit's sums.
    pub(crate) fn wait(&mut self, context: &Context, unit: UnitId) -> Result<(), Error> {
        let buffer = self.units[unit.index()].reduced();
        let taken = mem::replace(buffer, UnitBuffer::none());
        let UnitBuffer::UnderWay { pending, microbatch } = taken else {
            unreachable!("the machine waits for reductions that are under way: {unit}");
        };
        let (sums, non_finite) = pending.wait()?;
        *buffer = UnitBuffer::Held(sums);
        if let Some(non_finite) = non_finite {
            self.note(context, unit, microbatch, non_finite);
        }
        Ok(())
    }

    /// Takes the sums of the step, by unit, when nothing is under way: empty for units without any.
    pub(crate) fn take_sums(&mut self) -> Vec<GradientSums> {
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
        sums: &[GradientSums],
    ) -> Result<Option<Sighting>, Error> {
        self.with_noted(context, step, sums.iter().map(Some))
    }

    /// Returns the first of the sighting that is known here and of those that a device has noted:
    /// in `sums`, by unit, in the buffers of microbatches, and in unsharded sums.
    fn with_noted<'a>(
        &'a self,
        context: &Context,
        step: u64,
        sums: impl Iterator<Item = Option<&'a GradientSums>>,
    ) -> Result<Option<Sighting>, Error> {
        let spares = self.units.iter().map(|unit| Some(&unit.spare)).enumerate();
        let noting = sums.enumerate().chain(spares);
        let noting = noting.filter_map(|(unit, sums)| Some((UnitId::new(unit), sums?)));
        let site = context.site("check", step);
        let noted = GradientSums::sighting(site, noting)?;
        let unsharded = self.unsharded.sighting(site)?;
        Ok([self.sighting, noted, unsharded].into_iter().flatten().min())
    }

    fn take_offered(&mut self, unit: UnitId) -> UnitGradients {
        self.units[unit.index()].offered.take().expect("the machine takes what was offered")
    }

    /// Keeps a sighting if it is the first.
    fn note(&mut self, context: &Context, unit: UnitId, microbatch: usize, found: NonFiniteAt) {
        let parameter = context.number_of(ParamId { unit, index: found.param });
        let when = When::Microbatch(microbatch);
        let from = found.from.map(Rank::index);
        let sighting = Sighting { when, parameter, from };
        self.sighting = Some(self.sighting.map_or(sighting, |first| first.min(sighting)));
    }
}

/// Returns how a reduce-scatter scales whose contributions are sums of this many microbatches.
fn scaling_of_reduce_scatter(context: &Context, microbatches: usize) -> Result<Scaling, Error> {
    scaling(context, divide_plan(context, microbatches).reduce_scatter)
}

/// Returns how a reduction over the replicas of sums of this many microbatches scales; without
/// replicas, by 1.
fn scaling_over_replicas(context: &Context, microbatches: usize) -> Result<Scaling, Error> {
    let divides = divide_plan(context, microbatches).all_reduce;
    scaling(context, divides.unwrap_or(Divides::NONE))
}

fn divide_plan(context: &Context, microbatches: usize) -> DividePlan {
    DividePlan::of(Parties {
        wire: context.options.wire(),
        shard_members: context.plan.mesh().shard_size(),
        replicate_members: Some(context.plan.mesh().replicate_size()),
        microbatches_in_contribution: microbatches,
        microbatches_in_partial: microbatches,
        objective: context.options.objective,
    })
}

fn scaling(context: &Context, divides: Divides) -> Result<Scaling, Error> {
    let wire = Wire::try_from(context.options.wire())
        .map_err(|error| Error::Options { what: error.to_string() })?;
    Ok(Scaling { wire, pre: divisor(divides.pre)?, post: divisor(divides.post)? })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a power of two, or members over one: exact in f32"
)]
fn divisor(divisor: f64) -> Result<Divisor, Error> {
    Ok(Divisor::new(divisor as f32)?)
}
