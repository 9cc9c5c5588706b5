//! The reductions of one step: one reduce-scatter for each microbatch into the partial, one all-reduce at the end.
//!
//! Gradients may be offered in any order. They are issued in the plan's order, which is the same on
//! all ranks. A unit that a rank does not offer is issued with zeros when its microbatch ends. Where processes compute on devices, gathers
//! and reductions are one sequence: then it is issued with zeros at its place there.

mod in_one_order;
mod transients;

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Contribution, NonFiniteAt, Stage};
use hsdp_kernels::Fold;
use hsdp_sharding::{Accumulation, ParamId, Plan, Rank, UnitId};

use crate::agree::interim::Interim;
use crate::error::Error;
use crate::state::context::Context;
use crate::state::events::Event;
use crate::state::sighting::{Sighting, When};
use crate::state::sums::device::DeviceSums;
use crate::state::sums::{AllReducing, Scattering, Sums};
use crate::step::partial::{Offer, Partial, Settled};
use crate::step::place::{Place, Turn};
use crate::step::unit_gradients::UnitGradients;
use crate::step::unsharded::Unsharded;

/// Whether to wait for a collective that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// No: a collective that is not complete is left for later.
    IfComplete,
    /// Yes, until this many all-reduces are issued.
    Wait { limit: usize },
}

/// The reductions of one step.
#[derive(Debug)]
pub(crate) struct Reductions {
    /// By unit; units without a trainable parameter stay empty.
    partials: Vec<Partial>,
    /// The gradients that were offered in this microbatch, by unit.
    offers: Vec<Offer>,
    /// How many entries of the plan's order have been scattered in this microbatch.
    scattered: usize,
    /// How many gathers of this microbatch were issued, where gathers and reductions are one sequence.
    gathered: usize,
    /// How many entries of the plan's order have their all-reduce issued in this step.
    all_reduced: usize,
    /// Mode `Local`: the sums that wait for the last microbatch.
    unsharded: Unsharded,
    /// Mode `Every` with replicas: this microbatch's reduce-scatters, in the plan's order.
    scattering: Vec<(UnitId, Scattering)>,
    /// The same mode and order: the all-reduces that follow, while the microbatch ends.
    reducing: Vec<(UnitId, AllReducing)>,
    /// The same mode, by unit: the buffers of the microbatch before.
    transients: Vec<Sums>,
    /// The first element of this rank's partials that was found not to be finite.
    sighting: Option<Sighting>,
}

impl Reductions {
    /// Reductions that belong to no step yet.
    pub(crate) fn new(plan: &Plan) -> Self {
        let units = plan.spec().units().len();
        Self {
            partials: (0..units).map(|_| Partial::default()).collect(),
            offers: (0..units).map(|_| Offer::default()).collect(),
            scattered: 0,
            gathered: 0,
            all_reduced: 0,
            unsharded: Unsharded::new(plan),
            scattering: Vec::new(),
            reducing: Vec::new(),
            transients: (0..units).map(|_| Sums::default()).collect(),
            sighting: None,
        }
    }

    /// Begins a step, into the sums of a step before, which are taken.
    pub(crate) fn begin(&mut self, context: &Context, sums: &mut [Sums]) {
        for (partial, sums) in self.partials.iter_mut().zip(sums) {
            *partial = Partial::Empty(mem::take(sums));
        }
        self.begin_microbatch();
        (self.all_reduced, self.sighting) = (0, None);
        self.unsharded.begin(context);
    }

    pub(crate) fn begin_microbatch(&mut self) {
        self.scattered = 0;
        self.offers.fill_with(Offer::default);
    }

    /// Refuses a unit whose gradients were offered in this microbatch already.
    pub(crate) fn check_offer(
        &self,
        context: &Context,
        place: Place,
        unit: UnitId,
    ) -> Result<(), Error> {
        let (name, microbatch) = (&context.plan.spec()[unit].name, place.microbatch);
        let what = match self.offers[unit.index()] {
            Offer::Nothing => return Ok(()),
            Offer::Missed => format!(
                "the gradients of unit {name} come too late in microbatch {microbatch}: a unit that follows in the backward was \
                 unsharded before, and zeros were reduced in their place. Where processes compute on devices, a unit is reduced before \
                 the next one is unsharded; with Unused::Zeros, units are reduced at the end of the microbatch"
            ),
            _ => format!(
                "unit {name} was reduced in microbatch {microbatch} before: add its gradients up, and reduce their sum once"
            ),
        };
        Err(context.misuse("reduce", place.step, what))
    }

    /// Takes a unit's gradients of this microbatch, which [`check_offer`](Self::check_offer) has let pass, and issues the
    /// reductions that are next in the plan's order.
    pub(crate) fn offer(
        &mut self,
        context: &Context,
        place: Place,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<(), Error> {
        self.offers[unit.index()] = match context.plan.options().accumulation {
            Accumulation::Local => self.accumulate(context, place, (unit, gradients))?,
            _ => Offer::Waiting(gradients),
        };
        self.advance(context, place)
    }

    /// Mode `Local`: adds a unit's gradients to those of the microbatches before; the last one offers the sum.
    fn accumulate(
        &mut self,
        context: &Context,
        place: Place,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<Offer, Error> {
        if let Some(non_finite) = self.unsharded.add(context, place, (unit, &gradients))? {
            self.note(context, unit, (place.microbatch, non_finite));
        }
        Ok(match place.turn {
            Turn::MayFollow => Offer::Taken,
            Turn::Last => Offer::Waiting(self.unsharded.take(&context.plan, unit)),
        })
    }

    /// Ends a microbatch: units that were not offered are issued with zeros.
    pub(crate) fn finish_microbatch(
        &mut self,
        context: &Context,
        place: Place,
    ) -> Result<(), Error> {
        if context.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow
        {
            return Ok(());
        }
        self.offer_rest(context);
        self.advance(context, place)?;
        self.settle_transients(context, place)
    }

    /// Ends the step: puts the gradients of all units, reduced over both axes, into `sums`; empty for units without
    /// any.
    pub(crate) fn finish_step(
        &mut self,
        context: &Context,
        place: Place,
        sums: &mut [Sums],
    ) -> Result<(), Error> {
        if context.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow
        {
            self.begin_microbatch();
            self.offer_rest(context);
        }
        let last = Place { turn: Turn::Last, ..place };
        // Where ranks ask each other for overflows first, no all-reduce starts before that.
        self.advance(context, if context.expects_overflow() { place } else { last })?;
        let limit =
            if context.expects_overflow() { self.ask_for_overflow(context, place)? } else { None };
        self.all_reduce(context, last, Patience::Wait { limit: limit.unwrap_or(usize::MAX) })?;
        for (unit, sums) in sums.iter_mut().enumerate() {
            *sums = self.settle(context, UnitId::new(unit))?.partial;
        }
        Ok(())
    }

    /// The first element of this rank's partials that was not finite, if there is one. `grad_shards` were made of these
    /// partials. Waits for the notes of a device.
    pub(crate) fn sighting(
        &self,
        context: &Context,
        (step, grad_shards): (u64, &[Sums]),
    ) -> Result<Option<Sighting>, Error> {
        let every = context.reduces_every_microbatch();
        let noting = if every { self.transients.as_slice() } else { grad_shards };
        let noting = noting.iter().enumerate().map(|(unit, sums)| (UnitId::new(unit), sums));
        self.with_noted(context, step, noting)
    }

    /// The first of the sighting that is known here and those that a device has noted in `noting`.
    fn with_noted<'a>(
        &self,
        context: &Context,
        step: u64,
        noting: impl Iterator<Item = (UnitId, &'a Sums)>,
    ) -> Result<Option<Sighting>, Error> {
        let on_device = noting.filter_map(|(unit, sums)| Some((unit, sums.on_device()?)));
        let noted = DeviceSums::sighting(context, &on_device.collect::<Vec<_>>(), step)?;
        let unsharded = self.unsharded.sighting(context, step)?;
        Ok([self.sighting, noted, unsharded].into_iter().flatten().min())
    }

    /// Asks all ranks, before the all-reduces, whether a partial has overflowed. If so, each rank issues as many
    /// all-reduces as the rank that is furthest, so that those under way complete. Returns that number.
    fn ask_for_overflow(
        &mut self,
        context: &Context,
        place: Place,
    ) -> Result<Option<usize>, Error> {
        for unit in 0..self.partials.len() {
            if matches!(self.partials[unit], Partial::Scattering { .. }) {
                let Settled { partial, .. } = self.settle(context, UnitId::new(unit))?;
                self.partials[unit] = Partial::Held(partial);
            }
        }
        let held = self.partials.iter().enumerate().filter_map(|(unit, partial)| match partial {
            Partial::Held(sums) => Some((UnitId::new(unit), sums)),
            _ => None,
        });
        let sighting = self.with_noted(context, place.step, held)?;
        let said = Interim { all_reduces: self.all_reduced, sighting }.encode();
        let tag = context.tag(None, Stage::Agreement, place.step, place.microbatch);
        let overflow = context.control.exchange_in_step(tag, said, Interim::overflow)?;
        Ok(overflow.map(|overflow| overflow.all_reduces))
    }

    /// Waits for the collective that is under way on a unit's partial, and takes the partial.
    fn settle(&mut self, context: &Context, unit: UnitId) -> Result<Settled, Error> {
        let settled = self.partials[unit.index()].take().settle()?;
        if let Some((microbatch, non_finite)) = settled.non_finite {
            self.note(context, unit, (microbatch, non_finite));
        }
        Ok(settled)
    }

    /// Keeps a sighting if it is the first.
    fn note(&mut self, context: &Context, unit: UnitId, (microbatch, found): (usize, NonFiniteAt)) {
        let parameter = context.number_of(ParamId { unit, index: found.param });
        let (when, from) = (When::Microbatch(microbatch), found.from.map(Rank::index));
        let sighting = Sighting { when, parameter, from };
        self.sighting = Some(self.sighting.map_or(sighting, |first| first.min(sighting)));
    }

    /// Offers the unsharded sums of every unit that was not offered; without sums, entries without a gradient.
    fn offer_rest(&mut self, context: &Context) {
        let plan = &context.schedules.current().plan;
        for unit in plan.reductions()[self.scattered..].iter().copied() {
            if matches!(self.offers[unit.index()], Offer::Nothing) {
                let rest = self.unsharded.take(&context.plan, unit);
                self.offers[unit.index()] = Offer::Waiting(rest);
            }
        }
    }

    /// Issues the reductions that are next in the plan's order, as far as their gradients were offered.
    fn advance(&mut self, context: &Context, place: Place) -> Result<(), Error> {
        let schedule = context.schedules.current();
        let (plan, in_one_order) = (&schedule.plan, context.issues_in_one_order());
        while let Some(unit) = plan.reductions().get(self.scattered).copied() {
            if self.gathers_before_next(context, place) > Some(self.gathered) {
                break;
            }
            let Some(gradients) = self.offers[unit.index()].take() else { break };
            self.scattered += 1;
            self.scatter(context, place, (unit, gradients))?;
            if place.turn == Turn::Last && in_one_order {
                let limit = self.scattered - 1;
                self.all_reduce(context, place, Patience::Wait { limit })?;
            }
        }
        match place.turn {
            Turn::Last if !in_one_order => self.all_reduce(context, place, Patience::IfComplete),
            _ => Ok(()),
        }
    }

    fn scatter(
        &mut self,
        context: &Context,
        place: Place,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<(), Error> {
        let every = context.reduces_every_microbatch();
        let (partial, fold) = if every {
            (mem::take(&mut self.transients[unit.index()]), Fold::Replace)
        } else {
            let Settled { partial, fold, .. } = self.settle(context, unit)?;
            (partial, fold)
        };
        let len = context.plan.layout(unit).trainable().shard_len;
        let mut partial = partial.sized(context, len, (place.step, unit))?;
        if fold == Fold::Replace && (!every || place.microbatch == 0) {
            partial.begin(context, place.step)?;
        }
        context.events.push(Event::ReduceScatter { unit, microbatch: place.microbatch });
        let contribution = Contribution {
            gradients: gradients.entries,
            scaling: place.scaling_of_reduce_scatter(context)?,
        };
        let tag = context.tag(Some(unit), Stage::Reduce, place.step, place.microbatch);
        let layout = Arc::clone(context.plan.layout(unit));
        let pending = partial.scatter(context, (tag, layout), contribution, fold)?;
        if every {
            self.scattering.push((unit, pending));
        } else {
            let microbatch = place.microbatch;
            self.partials[unit.index()] = Partial::Scattering { pending, microbatch };
        }
        Ok(())
    }

    /// Issues the step's all-reduces in the plan's order, as far as their reduce-scatters are done.
    fn all_reduce(
        &mut self,
        context: &Context,
        place: Place,
        patience: Patience,
    ) -> Result<(), Error> {
        if !context.has_replicas() || context.plan.options().accumulation == Accumulation::Every {
            return Ok(());
        }
        let plan = &context.schedules.current().plan;
        while let Some(unit) = plan.reductions().get(self.all_reduced).copied() {
            let issued = self.all_reduced < self.scattered;
            let ready = match patience {
                Patience::IfComplete => self.partials[unit.index()].is_complete(),
                Patience::Wait { limit } => self.all_reduced < limit,
            };
            if !(issued && ready) {
                break;
            }
            let Settled { partial, .. } = self.settle(context, unit)?;
            let pending = issue_all_reduce(context, place, (unit, partial))?;
            self.partials[unit.index()] = Partial::AllReducing(pending);
            self.all_reduced += 1;
        }
        Ok(())
    }
}

fn issue_all_reduce(
    context: &Context,
    place: Place,
    (unit, partial): (UnitId, Sums),
) -> Result<AllReducing, Error> {
    context.events.push(Event::AllReduce { unit, microbatch: place.microbatch });
    let tag = context.tag(Some(unit), Stage::AllReduce, place.step, place.microbatch);
    let scaling = place.scaling_of_all_reduce(context)?;
    partial.all_reduce(context, tag, scaling)
}
