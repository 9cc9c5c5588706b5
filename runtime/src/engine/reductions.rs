//! The reductions of one step: a reduce-scatter a microbatch into the partial, one all-reduce at the end.
//!
//! Gradients may be offered in any order. They are issued in the plan's, which is the same on all
//! ranks; what a rank does not offer is issued with zeros when its microbatch ends.

use std::mem;
use std::sync::Arc;

use hsdp_comm::{Contribution, Pending, Stage};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, Fold, GradientValues, Wire, settle};
use hsdp_sharding::{Accumulation, Plan, UnitId};

use crate::divide::{DividePlan, Divides, Reduction};
use crate::engine::events::{Event, Events};
use crate::engine::fabric::Fabric;
use crate::engine::unsharded::UnshardedGradients;
use crate::error::Error;

/// A unit's gradients, by index of the parameter in its unit; `None` where it has none this time.
pub type UnitGradients = Vec<Option<Arc<dyn GradientValues>>>;

/// Where in a step a reduction takes place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) step: u64,
    pub(crate) microbatch: usize,
    pub(crate) turn: Turn,
}

/// Whether another microbatch follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Yes, or nobody knows.
    MayFollow,
    /// No: all-reduces may start.
    Last,
}

impl Place {
    fn microbatches_so_far(self) -> usize {
        self.microbatch + 1
    }
}

/// The partial of one unit, from its first microbatch to the finished gradient.
#[derive(Debug)]
enum Partial {
    /// No microbatch has reached it. A buffer of the step before may lie here for reuse.
    Empty(Vec<f32>),
    /// Nothing is under way, and something has been accumulated.
    Held(Vec<f32>),
    /// A reduce-scatter adds to it.
    Scattering(Pending<Vec<f32>>),
    /// The all-reduce of the step is under way.
    AllReducing(Pending<Vec<f32>>),
}

impl Partial {
    /// The buffer, once nothing is under way, and what the next reduce-scatter does with it.
    fn settle(self) -> Result<(Vec<f32>, Fold), Error> {
        match self {
            Self::Empty(buffer) => Ok((buffer, Fold::Replace)),
            Self::Held(buffer) => Ok((buffer, Fold::Add)),
            Self::Scattering(pending) | Self::AllReducing(pending) => {
                Ok((pending.wait()?, Fold::Add))
            }
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Self::Empty(_) | Self::Held(_) => true,
            Self::Scattering(pending) | Self::AllReducing(pending) => pending.is_complete(),
        }
    }
}

/// Whether to wait for a collective that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    IfComplete,
    Wait,
}

/// What has become of a unit's gradients in this microbatch.
#[derive(Debug, Default)]
enum Offer {
    /// Nobody has brought them.
    #[default]
    Nothing,
    /// They wait for their turn in the plan's order.
    Waiting(UnitGradients),
    /// They were issued, or wait unsharded for the last microbatch.
    Taken,
}

impl Offer {
    /// What waits, which is taken now.
    fn take(&mut self) -> Option<UnitGradients> {
        match mem::replace(self, Self::Taken) {
            Self::Waiting(gradients) => Some(gradients),
            other => {
                *self = other;
                None
            }
        }
    }
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
    /// Mode `Every`: the one reduce-scatter that has not been added to its accumulator.
    transient: Option<(UnitId, Pending<Vec<f32>>)>,
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
            transient: None,
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
        events: &mut Events,
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
        self.advance(fabric, events, place)
    }

    /// Ends a microbatch: what was not offered goes out with zeros.
    pub(crate) fn finish_microbatch(
        &mut self,
        fabric: &Fabric,
        events: &mut Events,
        place: Place,
    ) -> Result<(), Error> {
        if fabric.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow
        {
            return Ok(());
        }
        self.offer_rest(fabric);
        self.advance(fabric, events, place)?;
        self.settle_transient(fabric, events, place)
    }

    /// Ends the step: the gradients of all units, reduced over both axes; empty for units without any.
    pub(crate) fn finish_step(
        &mut self,
        fabric: &Fabric,
        events: &mut Events,
        place: Place,
    ) -> Result<Vec<Vec<f32>>, Error> {
        if fabric.plan.options().accumulation == Accumulation::Local
            && place.turn == Turn::MayFollow
        {
            self.begin_microbatch();
            self.offer_rest(fabric);
        }
        let last = Place { turn: Turn::Last, ..place };
        self.advance(fabric, events, last)?;
        self.all_reduce(fabric, events, last, Patience::Wait)?;
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
    fn advance(&mut self, fabric: &Fabric, events: &mut Events, place: Place) -> Result<(), Error> {
        while let Some(unit) = fabric.plan.reductions().get(self.scattered).copied() {
            let Some(gradients) = self.offers[unit.index()].take() else { break };
            self.scattered += 1;
            self.scatter(fabric, events, place, (unit, gradients))?;
        }
        match place.turn {
            Turn::Last => self.all_reduce(fabric, events, place, Patience::IfComplete),
            Turn::MayFollow => Ok(()),
        }
    }

    fn scatter(
        &mut self,
        fabric: &Fabric,
        events: &mut Events,
        place: Place,
        (unit, gradients): (UnitId, UnitGradients),
    ) -> Result<(), Error> {
        self.settle_transient(fabric, events, place)?;
        let every = reduces_replicas_every_microbatch(fabric);
        let (partial, fold) = if every {
            (Vec::new(), Fold::Replace)
        } else {
            mem::replace(&mut self.partials[unit.index()], Partial::Empty(Vec::new())).settle()?
        };
        let partial = sized(partial, fabric.plan.layout(unit).trainable().shard_len);
        events.push(Event::ReduceScatter { unit, microbatch: place.microbatch });
        let divides = divide_plan(fabric, place).reduce_scatter;
        let contribution =
            Contribution { gradients, wire: wire(fabric)?, pre: divisor(divides.pre)? };
        let tag = fabric.tag(Some(unit), Stage::Reduce, place.step, place.microbatch);
        let layout = Arc::clone(fabric.plan.layout(unit));
        let post = divisor(divides.post)?;
        let pending = fabric.reduce.reduce_unit(tag, layout, contribution, post, fold, partial)?;
        if every {
            self.transient = Some((unit, pending));
        } else {
            self.partials[unit.index()] = Partial::Scattering(pending);
        }
        Ok(())
    }

    /// Issues the step's all-reduces in the plan's order, as far as their reduce-scatters are done.
    fn all_reduce(
        &mut self,
        fabric: &Fabric,
        events: &mut Events,
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
            let (partial_sum, _) = mem::replace(partial, Partial::Empty(Vec::new())).settle()?;
            let pending = issue_all_reduce(fabric, events, place, (unit, partial_sum))?;
            self.partials[unit.index()] = Partial::AllReducing(pending);
            self.all_reduced += 1;
        }
        Ok(())
    }

    /// Mode `Every`: all-reduces the last reduce-scatter's output and adds it to the accumulator.
    ///
    /// One at a time on purpose: it bounds the memory to one transient unit. Who wants overlap here
    /// wants the default mode.
    fn settle_transient(
        &mut self,
        fabric: &Fabric,
        events: &mut Events,
        place: Place,
    ) -> Result<(), Error> {
        let Some((unit, pending)) = self.transient.take() else { return Ok(()) };
        let reduced = pending.wait()?;
        let reduced = issue_all_reduce(fabric, events, place, (unit, reduced))?.wait()?;
        let partial = &mut self.partials[unit.index()];
        let (accumulator, fold) = mem::replace(partial, Partial::Empty(Vec::new())).settle()?;
        let mut accumulator = sized(accumulator, reduced.len());
        settle(&mut accumulator, &reduced, Divisor::ONE, fold);
        *partial = Partial::Held(accumulator);
        Ok(())
    }
}

fn issue_all_reduce(
    fabric: &Fabric,
    events: &mut Events,
    place: Place,
    (unit, partial): (UnitId, Vec<f32>),
) -> Result<Pending<Vec<f32>>, Error> {
    events.push(Event::AllReduce { unit, microbatch: place.microbatch });
    let divides = divide_plan(fabric, place).all_reduce.unwrap_or(Divides { pre: 1.0, post: 1.0 });
    let tag = fabric.tag(Some(unit), Stage::AllReduce, place.step, place.microbatch);
    let (pre, post) = (divisor(divides.pre)?, divisor(divides.post)?);
    Ok(fabric.all_reduce.all_reduce_scaled(tag, partial, wire(fabric)?, pre, post)?)
}

fn has_replicas(fabric: &Fabric) -> bool {
    fabric.plan.mesh().replicate_size() > 1
}

fn reduces_replicas_every_microbatch(fabric: &Fabric) -> bool {
    has_replicas(fabric) && fabric.plan.options().accumulation == Accumulation::Every
}

fn divide_plan(fabric: &Fabric, place: Place) -> DividePlan {
    let accumulation = fabric.plan.options().accumulation;
    let so_far = place.microbatches_so_far();
    DividePlan::of(Reduction {
        wire: fabric.options.wire(),
        shard_members: fabric.plan.mesh().shard_size(),
        replicate_members: Some(fabric.plan.mesh().replicate_size()),
        microbatches_in_contribution: if accumulation == Accumulation::Local { so_far } else { 1 },
        microbatches_in_partial: if accumulation == Accumulation::Every { 1 } else { so_far },
        objective: fabric.options.objective,
    })
}

fn wire(fabric: &Fabric) -> Result<Wire, Error> {
    Wire::try_from(fabric.options.wire())
        .map_err(|error| Error::Options { what: error.to_string() })
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "a power of two, or members over one: exact in f32"
)]
fn divisor(divisor: f64) -> Result<Divisor, Error> {
    Ok(Divisor::new(divisor as f32)?)
}

/// The buffer, if it has that length already; a new one otherwise.
fn sized(buffer: Vec<f32>, len: usize) -> Vec<f32> {
    if buffer.len() == len {
        return buffer;
    }
    let _partial = memory::scope(Category::Partial);
    vec![0.0; len]
}
