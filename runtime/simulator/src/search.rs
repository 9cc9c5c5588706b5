//! The search for the fastest step: all meshes and options of a model on so many ranks, of which those that fit are simulated.
//!
//! A step takes at least as long as its computation. So candidates are simulated in the order of that bound, and one is left out if its bound is
//! slower than the last of the list and than what was found for its mesh and number of microbatches. The result is that of simulating all.

mod candidate;
mod space;
mod unfit;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use itertools::iproduct;

pub use self::candidate::{AfterForwards, Candidate, PlanChoice};
pub use self::space::Space;
pub use self::unfit::Unfit;
use crate::{Error, Prediction, Workload};

/// A candidate that was simulated.
#[derive(Clone, Debug)]
pub struct Found {
    /// The candidate.
    pub candidate: Candidate,
    /// Its step.
    pub workload: Workload,
    /// The prediction of the step.
    pub prediction: Prediction,
}

/// Replicas, shards and microbatches.
pub(crate) type Cell = (usize, usize, u64);

/// The result of a search.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The fastest, by tokens a second; of equal ones that with the least memory. A candidate whose step takes the time of another one on the
    /// same mesh, to the picosecond, is left out if it takes as much memory.
    pub best: Vec<Found>,
    /// Tokens a second of the fastest of each mesh and number of microbatches.
    pub cells: BTreeMap<Cell, f64>,
    /// The number of candidates that do not fit, by reason.
    pub unfit: BTreeMap<Unfit, u64>,
    /// The number of candidates.
    pub candidates: u64,
    /// The number of those that were simulated.
    pub simulated: u64,
}

/// A candidate that fits.
struct Fit {
    candidate: Candidate,
    workload: Workload,
    /// At most so many tokens a second.
    bound: f64,
}

impl Search {
    /// Searches a space for its `top` fastest steps.
    ///
    /// # Errors
    /// [`Error::BatchTokens`]; those of a plan, and of [`Workload::predict`].
    pub fn of(space: &Space<'_>, top: NonZeroUsize) -> Result<Self, Error> {
        let mut search = Self::default();
        let mut fit = search.fitting(space)?;
        fit.sort_by(|one, other| other.bound.total_cmp(&one.bound));
        for Fit { candidate, workload, bound } in fit {
            if search.may_improve(&candidate, bound, top) {
                let prediction = workload.predict(space.machine)?;
                search.take(Found { candidate, workload, prediction }, top);
            }
        }
        Ok(search)
    }

    /// The candidates that fit; counts all.
    fn fitting(&mut self, space: &Space<'_>) -> Result<Vec<Fit>, Error> {
        let mut fitting = Vec::new();
        let loads = space.loads()?;
        for choice in space.plan_choices()? {
            let plan = Arc::new(space.plan(&choice)?);
            let of_dtype = loads.iter().filter(|load| load.batch.dtype == choice.param_dtype());
            let memories = space.offloads.iter().map(|it| (*it, space.memory(&plan, *it)));
            for ((offload, memory), load) in iproduct!(memories, of_dtype) {
                self.candidates += 1;
                match space.fits(memory, load) {
                    Ok(bound) => {
                        let workload = space.workload(&plan, load, offload);
                        let candidate = Candidate::of(choice, &workload);
                        fitting.push(Fit { candidate, workload, bound });
                    }
                    Err(unfit) => *self.unfit.entry(unfit).or_default() += 1,
                }
            }
        }
        Ok(fitting)
    }

    /// Whether a candidate with at most so many tokens a second may be among the best, of all or of its cell.
    fn may_improve(&self, candidate: &Candidate, bound: f64, top: NonZeroUsize) -> bool {
        let last = self.best.get(top.get() - 1).map_or(0.0, speed);
        bound >= last || bound > self.cells.get(&candidate.cell()).copied().unwrap_or(0.0)
    }

    fn take(&mut self, found: Found, top: NonZeroUsize) {
        self.simulated += 1;
        let cell = self.cells.entry(found.candidate.cell()).or_default();
        *cell = cell.max(speed(&found));
        match self.best.iter_mut().find(|best| best.is_like(&found)) {
            Some(like) if like.memory() <= found.memory() => return,
            Some(like) => *like = found,
            None => self.best.push(found),
        }
        self.best.sort_by(|one, other| {
            speed(other).total_cmp(&speed(one)).then(one.memory().cmp(&other.memory()))
        });
        self.best.truncate(top.get());
    }
}

fn speed(found: &Found) -> f64 {
    found.prediction.tokens_per_second()
}

impl Found {
    fn memory(&self) -> u64 {
        self.prediction.memory.total().get()
    }

    fn is_like(&self, other: &Self) -> bool {
        let key =
            |it: &Self| (it.candidate.mesh(), it.prediction.timing.step, it.prediction.tokens);
        key(self) == key(other)
    }
}
