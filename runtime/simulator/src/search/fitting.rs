//! The candidates that fit, in few bytes each.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

use hsdp_sharding::{Mesh, Offload};

use super::Cell;
use super::bound::{self, PlanCost};
use super::candidate::PlanChoice;
use super::space::{Load, Space};
use super::unfit::Unfit;
use crate::prediction::{Groups, OnMachine, check_update, placement};
use crate::{Error, Workload};

/// A candidate that fits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// Upper bound of its tokens a second.
    pub(super) bound: f64,
    /// Bytes of a rank, those in the host's memory among them.
    pub(super) memory: u64,
    choice: u32,
    load: u32,
    offload: Offload,
}

/// All candidates that fit, in the order in which they are tried, and the number of others.
pub(super) struct Fitting<'a> {
    pub(super) space: &'a Space<'a>,
    pub(super) choices: Vec<PlanChoice>,
    pub(super) loads: Vec<Load>,
    groups: HashMap<Mesh, Arc<Groups>>,
    pub(super) fits: Vec<Fit>,
    pub(super) unfit: BTreeMap<Unfit, u64>,
    pub(super) candidates: u64,
}

/// The candidates of some choices.
#[derive(Default)]
struct Part {
    fits: Vec<Fit>,
    unfit: BTreeMap<Unfit, u64>,
    candidates: u64,
}

impl<'a> Fitting<'a> {
    /// Plans all choices, on all cores.
    ///
    /// # Errors
    /// [`Error::BatchTokens`]; [`Error::SearchTooLarge`]; [`Error::TooManyRanks`]; those of a plan
    /// and of its computation.
    pub(super) fn of(space: &'a Space<'a>) -> Result<Self, Error> {
        let meshes = space.meshes()?;
        let choices = space.plan_choices(&meshes);
        let batches = space.batches()?;
        space.check(choices.len(), &batches)?;
        let placed =
            meshes.iter().map(|mesh| Ok((*mesh, Arc::new(Groups::new(*mesh, space.machine)?))));
        let groups = placed.collect::<Result<HashMap<_, _>, Error>>()?;
        let loads = space.loads(&batches)?;
        let (fits, unfit) = (Vec::new(), BTreeMap::new());
        let mut fitting = Self { space, choices, loads, groups, fits, unfit, candidates: 0 };
        for part in fitting.parts()? {
            fitting.fits.extend(part.fits);
            fitting.candidates += part.candidates;
            for (unfit, count) in part.unfit {
                *fitting.unfit.entry(unfit).or_default() += count;
            }
        }
        Ok(fitting)
    }

    /// The candidates of all choices, in parts that follow each other.
    fn parts(&self) -> Result<Vec<Part>, Error> {
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let each = self.choices.len().div_ceil(threads).max(1);
        let part = |(number, choices): (usize, &[PlanChoice])| {
            let mut part = Part::default();
            for (place, choice) in choices.iter().enumerate() {
                self.consider(number * each + place, choice, &mut part)?;
            }
            Ok(part)
        };
        thread::scope(|scope| {
            let part = &part;
            let parts = self.choices.chunks(each).enumerate();
            let threads: Vec<_> = parts.map(|it| scope.spawn(move || part(it))).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        })
    }

    /// Adds the candidates of a choice.
    fn consider(&self, index: usize, choice: &PlanChoice, part: &mut Part) -> Result<(), Error> {
        let Self { space, loads, .. } = self;
        let machine = space.machine;
        let plan = Arc::new(space.plan(choice)?);
        check_update(&plan)?;
        let of_dtype = || {
            let loads = loads.iter().enumerate();
            loads.filter(|(_, load)| load.batch.dtype == choice.param_dtype())
        };
        let Some((_, first)) = of_dtype().next() else { return Ok(()) };
        let on = placement(machine);
        let processor = space.processor(choice.param_dtype())?;
        let two = Load { microbatches: 2, ..*first };
        let workload = space.workload(&plan, &two, Offload::None);
        let mut cost = None;
        for offload in space.offloads {
            let memory = space.memory(&plan, *offload);
            let update = bound::update(&workload, *offload, machine, &processor);
            for (load, it) in of_dtype() {
                part.candidates += 1;
                let memory = match space.fits(memory, it) {
                    Ok(memory) => memory,
                    Err(unfit) => {
                        *part.unfit.entry(unfit).or_default() += 1;
                        continue;
                    }
                };
                // Many choices have no candidate that fits.
                if cost.is_none() {
                    let groups = Arc::clone(&self.groups[&choice.mesh]);
                    let costs = OnMachine::among(&workload, machine, groups)?;
                    cost = Some(PlanCost::new(&workload, &costs, on));
                }
                let Some(cost) = &cost else { continue };
                let bound = space.tokens(it) as f64 / cost.seconds(it, update);
                #[expect(clippy::cast_possible_truncation, reason = "there are 2^21 candidates")]
                let (choice, load) = (index as u32, load as u32);
                part.fits.push(Fit { bound, memory, choice, load, offload: *offload });
            }
        }
        Ok(())
    }

    /// The numbers of all that fit.
    pub(super) fn indices(&self) -> impl Iterator<Item = u32> + use<> {
        #[expect(clippy::cast_possible_truncation, reason = "there are 2^21 candidates")]
        let count = self.fits.len() as u32;
        0..count
    }

    pub(super) fn choice(&self, fit: &Fit) -> &PlanChoice {
        &self.choices[fit.choice as usize]
    }

    fn load(&self, fit: &Fit) -> &Load {
        &self.loads[fit.load as usize]
    }

    pub(super) fn tokens(&self, fit: &Fit) -> u64 {
        self.space.tokens(self.load(fit))
    }

    /// The place of its mesh, and the tokens of a step.
    pub(super) fn kind(&self, fit: &Fit) -> (usize, u64) {
        (self.choice(fit).mesh.shard_size(), self.tokens(fit))
    }

    pub(super) fn cell(&self, fit: &Fit) -> Cell {
        let mesh = self.choice(fit).mesh;
        (mesh.replicate_size(), mesh.shard_size(), self.load(fit).microbatches)
    }

    pub(super) fn groups_of(&self, fit: &Fit) -> &Arc<Groups> {
        &self.groups[&self.choice(fit).mesh]
    }

    /// The step of a candidate, with a plan of its own.
    pub(super) fn workload(&self, fit: &Fit) -> Result<Workload, Error> {
        let plan = Arc::new(self.space.plan(self.choice(fit))?);
        Ok(self.space.workload(&plan, self.load(fit), fit.offload))
    }
}
