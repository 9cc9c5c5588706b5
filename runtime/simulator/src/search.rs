//! The search for the fastest steps. Its candidates are all meshes and options of a model on a
//! number of ranks.
//!
//! Predictions have errors. So steps whose predictions differ by less than the [stated
//! error](StatedError) tie: the list has all that tie with the fastest first, by memory (what a
//! rank offloads into the host's counts too), then those one error further behind, and so on. A
//! candidate is left out if a listed one on the same mesh, with as many tokens, takes no more
//! memory and is not behind it by an error.
//!
//! A step takes at least as long as the sums of what each rank's thread, device and stream do
//! (`PlanCost`). So candidates are simulated in the order of that bound until it is slower than the
//! fastest, and then in the order of their memory, as far as their bounds allow.
//!
//! Memory and time are bounded: [`Space`] refuses a search that is too large before any work, a
//! candidate takes 40 bytes, plans are made again where they are simulated, and simulations have a
//! budget. Candidates that are left out for want of it are counted.

mod candidates;
mod space;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;

pub use self::space::{AfterForwards, Candidate, PlanChoice, Space, Unfit};

use self::candidates::{FittingCandidate, FittingCandidates};
use crate::simulation::Timing;
use crate::{Error, Placed, Prediction, StatedError, Workload};

/// A candidate that was simulated.
#[derive(Clone, Debug)]
pub struct Found {
    /// The candidate.
    pub candidate: Candidate,
    /// Its step.
    pub workload: Workload,
    /// The prediction of the step.
    pub prediction: Prediction,
    /// How many times the stated error it is behind the fastest: with 0 they tie.
    pub band: u32,
}

/// Replicas, shards and microbatches.
pub(crate) type Cell = (usize, usize, u64);

/// The result of a search.
#[derive(Clone, Debug)]
pub struct Search {
    /// The stated error of the predictions.
    pub error: StatedError,
    /// Tokens a second of the fastest prediction; 0 if nothing fits.
    pub fastest: f64,
    /// Best candidates: by band, then by memory, then by tokens a second, then in the order in
    /// which candidates are tried. All have at least half of the fastest speed.
    pub best: Vec<Found>,
    /// Tokens a second of the fastest of each mesh and number of microbatches, to the stated error.
    pub cells: BTreeMap<Cell, f64>,
    /// The number of candidates that do not fit, by reason.
    pub unfit: BTreeMap<Unfit, u64>,
    /// The number of candidates.
    pub candidates: u64,
    /// The number of those that were simulated.
    pub simulated: u64,
    /// The number of those that might have been in the result, and were not simulated since a
    /// search simulates only so much.
    pub over_budget: u64,
}

/// The budget of simulations, in colors and units: twenty seconds of a core.
const BUDGET: u64 = 30_000_000;
/// Colors that a simulation counts more than it has, for its plan and its costs.
const OF_PLAN: u64 = 8;
/// The part of the budget that the search for the fastest may use, and with it the list.
const FOR_FASTEST: f64 = 0.5;
const FOR_LIST: f64 = 0.85;
/// The part of the fastest speed that a listed step has at least.
const LEAST_LISTED: f64 = 0.5;

/// A step of no time has the speed of one of a picosecond.
const LEAST_TIME: f64 = 1e-12;

impl Search {
    /// Searches a space for its `top` best steps. The result depends on the arguments alone.
    ///
    /// # Errors
    /// [`Error::BatchTokens`]; [`Error::SearchTooLarge`], also if the budget of simulations leaves
    /// the list empty; [`Error::TooLong`] if all steps that fit are; those of a plan, and of
    /// [`Workload::predict`].
    pub fn of(space: &Space<'_>, top: NonZeroUsize) -> Result<Self, Error> {
        Self::within(space, top, BUDGET)
    }

    /// Searches a space with a budget of simulations, in kinds of ranks and units.
    fn within(space: &Space<'_>, top: NonZeroUsize, budget: u64) -> Result<Self, Error> {
        let fitting = FittingCandidates::of(space)?;
        let mut searching = Searching::new(&fitting, budget);
        searching.find_fastest()?;
        let best = searching.list(top)?;
        let cells = searching.cells()?;
        let (simulated, over_budget) = searching.counts();
        let fits = fitting.fits.len();
        if best.is_empty() && over_budget > 0 {
            return Err(Error::SearchTooLarge {
                problem: format!(
                    "{fits} candidates fit, and a search has no time to simulate {over_budget} of \
                     them, so it cannot list any: simulations take at most {budget} units, each \
                     counted for each kind of ranks; search fewer ranks, or a smaller model"
                ),
            });
        }
        if fits > 0 && searching.fastest == 0.0 {
            return Err(Error::TooLong);
        }
        let Searching { fastest, error, .. } = searching;
        let FittingCandidates { unfit, candidates, .. } = fitting;
        Ok(Self { error, fastest, best, cells, unfit, candidates, simulated, over_budget })
    }
}

/// Knowledge of a candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CandidateState {
    /// Its bound.
    Bound,
    /// Its tokens a second.
    Speed(f64),
    /// Its bound, since the budget was spent.
    OverBudget,
}

/// A search whose candidates are known.
struct Searching<'a> {
    fitting: &'a FittingCandidates<'a>,
    error: StatedError,
    fastest: f64,
    /// Knowledge of each candidate.
    known: Vec<CandidateState>,
    /// Candidates, those with the highest bound first.
    by_bound: Vec<u32>,
    budget: u64,
    spent: u64,
}

impl<'a> Searching<'a> {
    fn new(fitting: &'a FittingCandidates<'a>, budget: u64) -> Self {
        let fits = &fitting.fits;
        let mut by_bound: Vec<u32> = fitting.indices().collect();
        by_bound.sort_by(|one, other| {
            let [one, other] = [one, other].map(|it| fits[*it as usize].bound);
            other.total_cmp(&one)
        });
        let error = fitting.space.machine.stated_error(fitting.space.ranks);
        let known = vec![CandidateState::Bound; fits.len()];
        Self { fitting, error, fastest: 0.0, known, by_bound, budget, spent: 0 }
    }

    fn fit(&self, index: u32) -> &'a FittingCandidate {
        &self.fitting.fits[index as usize]
    }

    /// Returns the tokens a second of a candidate. It is simulated once; `None` if its simulation
    /// would take more than this part of the budget.
    fn speed(&mut self, index: u32, part: f64) -> Result<Option<f64>, Error> {
        if let CandidateState::Speed(speed) = self.known[index as usize] {
            return Ok(Some(speed));
        }
        let fit = self.fit(index);
        if !self.spend(fit, part) {
            self.known[index as usize] = CandidateState::OverBudget;
            return Ok(None);
        }
        let timing = self.simulate(fit)?.map(|(_, timing)| timing);
        let tokens = self.fitting.tokens(fit) as f64;
        let speed = timing.map_or(0.0, |it| tokens / it.step.seconds().max(LEAST_TIME));
        self.known[index as usize] = CandidateState::Speed(speed);
        self.fastest = self.fastest.max(speed);
        Ok(Some(speed))
    }

    /// Takes a simulation from the budget, and returns whether this part of it suffices.
    fn spend(&mut self, fit: &FittingCandidate, part: f64) -> bool {
        let colors = self.fitting.groups_of(fit).colors.len() as u64;
        let units = self.fitting.space.spec.units().len() as u64;
        let spent = self.spent.saturating_add(units.saturating_mul(colors + OF_PLAN));
        let suffices = spent as f64 <= self.budget as f64 * part;
        if suffices {
            self.spent = spent;
        }
        suffices
    }

    /// Simulates a candidate. `None` if the step takes too long to have a time: it is no result,
    /// and others may be.
    fn simulate(&self, fit: &FittingCandidate) -> Result<Option<(Workload, Timing)>, Error> {
        let workload = self.fitting.workload(fit)?;
        let groups = Arc::clone(self.fitting.groups_of(fit));
        let machine = self.fitting.space.machine;
        match Placed::among(&workload, machine, groups)?.timing(machine) {
            Err(Error::TooLong) => Ok(None),
            timing => Ok(Some((workload, timing?))),
        }
    }

    /// Finds the fastest prediction.
    fn find_fastest(&mut self) -> Result<(), Error> {
        for place in 0..self.by_bound.len() {
            let index = self.by_bound[place];
            if self.fit(index).bound <= self.fastest {
                return Ok(());
            }
            self.speed(index, FOR_FASTEST)?;
        }
        Ok(())
    }

    /// Lists the best.
    fn list(&mut self, top: NonZeroUsize) -> Result<Vec<Found>, Error> {
        let fits = &self.fitting.fits;
        let mut by_memory: Vec<u32> = self.fitting.indices().collect();
        by_memory.sort_by_key(|index| fits[*index as usize].memory);
        let mut listed = BestList::default();
        let fastest = self.fastest;
        let least = self.fastest * LEAST_LISTED;
        let mut upper = f64::INFINITY;
        let mut lower = self.error.floor(fastest);
        let mut band = 0;
        while listed.found.len() < top.get() && upper > least {
            let slowest = lower.max(least);
            let equal =
                |one: &u32, other: &u32| fits[*one as usize].memory == fits[*other as usize].memory;
            for equal in by_memory.chunk_by(equal) {
                let mut tied = Vec::new();
                for index in equal {
                    let fit = self.fit(*index);
                    if fit.bound < slowest || listed.has_as_good(self.fitting, fit) {
                        continue;
                    }
                    let speed = self.speed(*index, FOR_LIST)?;
                    tied.extend(
                        speed.filter(|it| (slowest..upper).contains(it)).map(|it| (it, *index)),
                    );
                }
                tied.sort_by(|one, other| other.0.total_cmp(&one.0));
                for (_, index) in tied {
                    if listed.found.len() < top.get()
                        && !listed.has_as_good(self.fitting, self.fit(index))
                        && let Some(found) = self.found(index, band)?
                    {
                        listed.found.push(found);
                        listed.put(self.fitting, self.fit(index));
                    }
                }
                if listed.found.len() == top.get() {
                    break;
                }
            }
            (upper, lower) = (lower, self.error.floor(lower));
            band += 1;
        }
        Ok(listed.found)
    }

    /// Returns a candidate with its prediction. Its simulation is repeated. `None` if the budget
    /// does not suffice.
    fn found(&mut self, index: u32, band: u32) -> Result<Option<Found>, Error> {
        let fit = self.fit(index);
        if !self.spend(fit, 1.0) {
            self.known[index as usize] = CandidateState::OverBudget;
            return Ok(None);
        }
        let found = self.simulate(fit)?.map(|(workload, timing)| {
            let candidate = Candidate::of(*self.fitting.choice(fit), &workload);
            let prediction = workload.prediction(self.fitting.space.machine, timing);
            Found { candidate, workload, prediction, band }
        });
        Ok(found)
    }

    /// Returns the fastest of each mesh and number of microbatches: to the error, since candidates
    /// that may be faster by less are not simulated.
    fn cells(&mut self) -> Result<BTreeMap<Cell, f64>, Error> {
        let mut cells: BTreeMap<Cell, f64> = BTreeMap::new();
        for index in self.fitting.indices() {
            if let CandidateState::Speed(speed) = self.known[index as usize] {
                let best = cells.entry(self.fitting.cell(self.fit(index))).or_default();
                *best = best.max(speed);
            }
        }
        for place in 0..self.by_bound.len() {
            let index = self.by_bound[place];
            let fit = self.fit(index);
            let cell = self.fitting.cell(fit);
            let best = cells.get(&cell).copied().unwrap_or(0.0);
            if self.error.floor(fit.bound) > best {
                let speed = self.speed(index, 1.0)?;
                let best = cells.entry(cell).or_default();
                *best = best.max(speed.unwrap_or(0.0));
            }
        }
        cells.retain(|_, speed| *speed > 0.0);
        Ok(cells)
    }

    /// Returns the number of candidates that were simulated, and of those that were not, since the
    /// budget was spent.
    fn counts(&self) -> (u64, u64) {
        let count = |is: fn(&&CandidateState) -> bool| self.known.iter().filter(is).count() as u64;
        let simulated = count(|it| matches!(it, CandidateState::Speed(_)));
        (simulated, count(|it| **it == CandidateState::OverBudget))
    }
}

/// The list, as far as it is made.
#[derive(Default)]
struct BestList {
    found: Vec<Found>,
    /// The least memory of a listed candidate, by mesh and tokens.
    least: HashMap<(usize, u64), u64>,
}

impl BestList {
    /// Returns whether a listed candidate of the same mesh and tokens takes no more memory: all
    /// that follow are no faster beyond the error.
    fn has_as_good(&self, fitting: &FittingCandidates<'_>, fit: &FittingCandidate) -> bool {
        self.least.get(&fitting.kind(fit)).is_some_and(|least| *least <= fit.memory)
    }

    fn put(&mut self, fitting: &FittingCandidates<'_>, fit: &FittingCandidate) {
        self.least.insert(fitting.kind(fit), fit.memory);
    }
}
