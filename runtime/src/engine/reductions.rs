//! The reductions of one step: a reduce-scatter a microbatch into the partial, one all-reduce at the end.
//!
//! Gradients may be offered in any order. They are issued in the plan's, which is the same on all
//! ranks; what a rank does not offer is issued with zeros when its microbatch ends.

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Accumulator, Contribution, Pending, Stage};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, Fold, GradientValues, settle};
use hsdp_sharding::{Accumulation, Plan, UnitId};

use crate::engine::events::Event;
use crate::engine::fabric::Fabric;
use crate::engine::partial::{Offer, Partial};
use crate::engine::place::{Place, Turn};
use crate::engine::scaling;
use crate::engine::unsharded::UnshardedGradients;
use crate::error::Error;

/// A unit's gradients, by index of the parameter in its unit; `None` where it has none this time.
pub type UnitGradients = Vec<Option<Arc<dyn GradientValues>>>;

/// Whether to wait for a collective that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    IfComplete,
    Wait,
}

/// The reductions of one step.
#[derive(Debug)]
pub(crate) struct Reductions {
    /// By unit; units without a trainable parameter stay empty.
    partials: Vec<Partial>,
    /// What was offered in this microbatch, by unit.
    offers: Vec<Offer>,
    /// How many entries of the plan's order have been scattered in this microbatch.
    scattered: usize,
    /// How many entries of the plan's order have their all-reduce issued in this step.
    all_reduced: usize,
    /// Mode `Local`: what waits for the last microbatch.
    unsharded: UnshardedGradients,
    /// Mode `Every` with replicas: this microbatch's reduce-scatters, in the plan's order.
    transients: Vec<(UnitId, Pending<Vec<f32>>)>,
}

impl Reductions {
    /// Begins a step; `buffers` are those of the step before, by unit, or empty.
    pub(crate) fn new(plan: &Plan, buffers: Vec<Vec<f32>>) -> Self {
        Self {
            offers: buffers.iter().map(|_| Offer::Nothing).collect(),
            unsharded: UnshardedGradients::new(plan),
            partials: buffers.into_iter().map(Partial::Empty).collect(),
            scattered: 0,
            all_reduced: 0,
            transients: Vec::new(),
        }
    }

    pub(crate) fn begin_microbatch(&mut self) {
        self.scattered = 0;
        self.offers.fill_with(Offer::default);
    }

    /// Takes a unit's gradients of this microbatch, and issues whatever is next in the plan's order.
    pub(crate) fn offer(
        &mut self,
        fabric: &Fabric,
        place: Place,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<(), Error> {
        let offer = &mut self.offers[unit.index()];
        if !matches!(offer, Offer::Nothing) {
            let what = format!(
                "unit {} was reduced in microbatch {} before: add its gradients up, and reduce their sum once",
                fabric.plan.spec()[unit].name,
                place.microbatch
            );
            return Err(fabric.misuse("reduce", place.step, what));
        }
        *offer = if fabric.plan.options().accumulation == Accumulation::Local {
            self.unsharded.add(unit, &gradients);
            match place.turn {
                Turn::MayFollow => Offer::Taken,
                Turn::Last => Offer::Waiting(self.unsharded.take(unit)),
            }
        } else {
            Offer::Waiting(gradients)
        };
        self.advance(fabric, place)
    }

    /// Ends a microbatch: what was not offered goes out with zeros.
    pub(crate) fn finish_microbatch(&mut self, fabric: &Fabric, place: Place) -> Result<(), Error> {
        if fabric.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow
        {
            return Ok(());
        }
        self.offer_rest(fabric);
        self.advance(fabric, place)?;
        self.settle_transients(fabric, place)
    }

    /// Ends the step: the gradients of all units, reduced over both axes; empty for units without any.
    pub(crate) fn finish_step(
        &mut self,
        fabric: &Fabric,
        place: Place,
    ) -> Result<Vec<Vec<f32>>, Error> {
        if fabric.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow
        {
            self.begin_microbatch();
            self.offer_rest(fabric);
        }
        let last = Place { turn: Turn::Last, ..place };
        self.advance(fabric, last)?;
        self.all_reduce(fabric, last, Patience::Wait)?;
        let partials = mem::take(&mut self.partials);
        partials.into_iter().map(|partial| Ok(partial.settle()?.0)).collect()
    }

    /// Offers, for every unit that nobody has brought, what there is of it.
    fn offer_rest(&mut self, fabric: &Fabric) {
        for unit in &fabric.plan.reductions()[self.scattered..] {
            let offer = &mut self.offers[unit.index()];
            if matches!(offer, Offer::Nothing) {
                *offer = Offer::Waiting(self.unsharded.take(*unit));
            }
        }
    }

    /// Issues what is next in the plan's order, as far as it has been offered.
    fn advance(&mut self, fabric: &Fabric, place: Place) -> Result<(), Error> {
        while let Some(unit) = fabric.plan.reductions().get(self.scattered).copied() {
            let Some(gradients) = self.offers[unit.index()].take() else { break };
            self.scattered += 1;
            self.scatter(fabric, place, (unit, gradients))?;
        }
        match place.turn {
            Turn::Last => self.all_reduce(fabric, place, Patience::IfComplete),
            Turn::MayFollow => Ok(()),
        }
    }

    fn scatter(
        &mut self,
        fabric: &Fabric,
        place: Place,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<(), Error> {
        let every = reduces_replicas_every_microbatch(fabric);
        let (partial, fold) = if every {
            (Vec::new(), Fold::Replace)
        } else {
            self.partials[unit.index()].take().settle()?
        };
        let partial = sized(partial, fabric.plan.layout(unit).trainable().shard_len);
        fabric.events.push(Event::ReduceScatter { unit, microbatch: place.microbatch });
        let contribution =
            Contribution { gradients, scaling: scaling::of_reduce_scatter(fabric, place)? };
        let accumulator = Accumulator { partial, fold };
        let tag = fabric.tag(Some(unit), Stage::Reduce, place.step, place.microbatch);
        let layout = Arc::clone(fabric.plan.layout(unit));
        let pending = fabric.reduce.reduce_unit(tag, layout, contribution, accumulator)?;
        if every {
            self.transients.push((unit, pending));
        } else {
            self.partials[unit.index()] = Partial::Scattering(pending);
        }
        Ok(())
    }

    /// Issues the step's all-reduces in the plan's order, as far as their reduce-scatters are done.
    fn all_reduce(
        &mut self,
        fabric: &Fabric,
        place: Place,
        patience: Patience,
    ) -> Result<(), Error> {
        if !has_replicas(fabric) || fabric.plan.options().accumulation == Accumulation::Every {
            return Ok(());
        }
        while let Some(unit) = fabric.plan.reductions().get(self.all_reduced).copied() {
            let issued = self.all_reduced < self.scattered;
            let partial = &mut self.partials[unit.index()];
            if !issued || (patience == Patience::IfComplete && !partial.is_complete()) {
                break;
            }
            let (partial_sum, _) = partial.take().settle()?;
            let pending = issue_all_reduce(fabric, place, (unit, partial_sum))?;
            self.partials[unit.index()] = Partial::AllReducing(pending);
            self.all_reduced += 1;
        }
        Ok(())
    }

    /// Mode `Every` with replicas: all-reduces what the microbatch has scattered, and adds it to the partials.
    ///
    /// Only here, where a microbatch ends and all of its gathers are done: a reduction that was waited for any earlier
    /// could wait for a rank that waits for one of this rank's gathers.
    fn settle_transients(&mut self, fabric: &Fabric, place: Place) -> Result<(), Error> {
        let mut reducing = Vec::with_capacity(self.transients.len());
        for (unit, pending) in self.transients.drain(..) {
            reducing.push((unit, issue_all_reduce(fabric, place, (unit, pending.wait()?))?));
        }
        for (unit, pending) in reducing {
            let reduced = pending.wait()?;
            let partial = &mut self.partials[unit.index()];
            let (accumulator, fold) = partial.take().settle()?;
            let mut accumulator = sized(accumulator, reduced.len());
            settle(&mut accumulator, &reduced, Divisor::ONE, fold);
            *partial = Partial::Held(accumulator);
        }
        Ok(())
    }
}

fn issue_all_reduce(
    fabric: &Fabric,
    place: Place,
    (unit, partial): (UnitId, Vec<f32>),
) -> Result<Pending<Vec<f32>>, Error> {
    fabric.events.push(Event::AllReduce { unit, microbatch: place.microbatch });
    let tag = fabric.tag(Some(unit), Stage::AllReduce, place.step, place.microbatch);
    let scaling = scaling::of_all_reduce(fabric, place)?;
    Ok(fabric.all_reduce.all_reduce_scaled(tag, partial, scaling)?)
}

fn has_replicas(fabric: &Fabric) -> bool {
    fabric.plan.mesh().replicate_size() > 1
}

fn reduces_replicas_every_microbatch(fabric: &Fabric) -> bool {
    has_replicas(fabric) && fabric.plan.options().accumulation == Accumulation::Every
}

/// The buffer, if it has that length already; a new one otherwise.
fn sized(buffer: Vec<f32>, len: usize) -> Vec<f32> {
    if buffer.len() == len {
        return buffer;
    }
    let _partial = memory::scope(Category::Partial);
    vec![0.0; len]
}
