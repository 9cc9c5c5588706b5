//! The buffers of a step, kept for the next one: fresh buffers would cost a pass of zeros.

use std::mem;
use std::ops::Deref;
use std::sync::Arc;
use std::thread;

use hsdp_sharding::Plan;
use parking_lot::Mutex;

use crate::state::sums::Sums;

/// The buffers of one model's steps, between the steps.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    /// By unit: this rank's sums.
    sums: Option<Vec<Sums>>,
    /// How often all buffers were released.
    generation: u64,
    forgotten: Forgotten,
}

/// Whether gradients were dropped without the update for which they were made.
#[derive(Clone, Copy, Debug, Default)]
enum Forgotten {
    #[default]
    None,
    /// Gradients of this step were dropped.
    Step(u64),
    /// The caller has been told, and is not told again.
    Told,
}

impl Kept {
    /// Returns the sums of a step before, by unit; empty ones if there are none.
    pub(crate) fn take(&self, plan: &Plan) -> Vec<Sums> {
        let none = || plan.spec().units().iter().map(|_| Sums::default()).collect();
        self.0.lock().sums.take().unwrap_or_else(none)
    }

    /// The step whose gradients were dropped without an update: once, and the first such step.
    pub(crate) fn take_forgotten(&self) -> Option<u64> {
        let forgotten = &mut self.0.lock().forgotten;
        let Forgotten::Step(step) = *forgotten else { return None };
        *forgotten = Forgotten::Told;
        Some(step)
    }

    /// Gradients that were dropped until now are not missed: their parameters have been replaced.
    pub(crate) fn forgive(&self) {
        let forgotten = &mut self.0.lock().forgotten;
        if let Forgotten::Step(_) = *forgotten {
            *forgotten = Forgotten::None;
        }
    }

    /// Releases the kept buffers, and those of gradients that still exist as soon as they are dropped.
    pub(crate) fn clear(&self) {
        let mut held = self.0.lock();
        held.generation += 1;
        let former = held.sums.take();
        drop(held);
        drop(former);
    }
}

/// The finished gradients of a step, by unit: this rank's shards, empty for units without any. When they are dropped, their buffers
/// serve another step.
#[derive(Debug)]
pub(crate) struct GradShards {
    sums: Vec<Sums>,
    /// By unit and parameter: whether it got a gradient on any rank in the step.
    pub(crate) present: Vec<Vec<bool>>,
    kept: Arc<Kept>,
    generation: u64,
    /// The step, until an optimizer has taken the gradients, if all ranks have agreed to apply them.
    awaits_update: Option<u64>,
}

impl GradShards {
    pub(crate) fn new(sums: Vec<Sums>, kept: &Arc<Kept>) -> Self {
        let generation = kept.0.lock().generation;
        Self { sums, present: Vec::new(), kept: Arc::clone(kept), generation, awaits_update: None }
    }

    /// Notes that an optimizer should take the gradients.
    pub(crate) fn await_update(&mut self, step: u64) {
        self.awaits_update = Some(step);
    }

    /// Notes that an optimizer has taken the gradients.
    pub(crate) fn taken(&mut self) {
        self.awaits_update = None;
    }
}

impl Deref for GradShards {
    type Target = [Sums];

    fn deref(&self) -> &[Sums] {
        &self.sums
    }
}

impl Drop for GradShards {
    fn drop(&mut self) {
        let mut held = self.kept.0.lock();
        // A panic ends more than the step, and is told of itself.
        let forgotten = self.awaits_update.filter(|_| !thread::panicking());
        if let (Some(step), Forgotten::None) = (forgotten, held.forgotten) {
            held.forgotten = Forgotten::Step(step);
        }
        // If the gradients of another step are kept already, these are freed.
        if held.sums.is_none() && held.generation == self.generation {
            held.sums = Some(mem::take(&mut self.sums));
        }
    }
}
