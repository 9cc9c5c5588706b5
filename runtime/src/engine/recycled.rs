//! The memory of a step, kept for the next one: fresh buffers would cost a pass of zeros, and fresh lists an
//! allocation.

use std::mem;
use std::ops::Deref;
use std::sync::Arc;
use std::thread;

use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::Plan;
use parking_lot::Mutex;

use crate::engine::fabric::Fabric;
use crate::engine::gathers::GatherQueue;
use crate::engine::reductions::Reductions;
use crate::engine::sums::{Seen, Sums};
use crate::presence::Presence;
use crate::uneven::Supply;

/// The working memory of a step, which nothing outside the step uses.
#[derive(Debug)]
pub(crate) struct Workings {
    pub(crate) reductions: Reductions,
    pub(crate) gathers: GatherQueue,
    pub(crate) presence: Presence,
    /// By unit: the norm of the sums, and whether they are finite.
    pub(crate) seen: Vec<Seen>,
    /// The ranks with and without data, as of the last question in the step.
    pub(crate) supply: Supply,
}

/// The finished gradients of a step, by unit.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    /// This rank's shards; empty for units without any.
    pub(crate) sums: Vec<Sums>,
    /// By parameter: whether it got a gradient on any rank.
    pub(crate) present: Vec<Vec<bool>>,
}

impl Finished {
    fn none(plan: &Plan) -> Self {
        let units = plan.spec().units();
        Self {
            sums: units.iter().map(|_| Sums::default()).collect(),
            present: units.iter().map(|unit| vec![false; unit.params.len()]).collect(),
        }
    }
}

/// The memory of one model's steps, between the steps.
#[derive(Debug, Default)]
pub(crate) struct Recycled(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    workings: Option<Workings>,
    finished: Option<Finished>,
    /// How often all memory was released.
    generation: u64,
    forgotten: Forgotten,
}

/// Whether gradients were dropped without the update for which they were made.
#[derive(Clone, Copy, Debug, Default)]
enum Forgotten {
    #[default]
    None,
    /// Those of this step.
    Step(u64),
    /// The caller has been told, and is not told again.
    Told,
}

impl Recycled {
    /// Takes the kept memory for a step, or makes new memory. The sums go to the reductions.
    pub(crate) fn take(&self, fabric: &Fabric) -> (Workings, Finished) {
        let mut held = self.0.lock();
        let (workings, finished) = (held.workings.take(), held.finished.take());
        drop(held);
        let mut finished = finished.unwrap_or_else(|| Finished::none(&fabric.plan));
        let mut workings = workings.unwrap_or_else(|| Workings {
            reductions: Reductions::new(&fabric.plan),
            gathers: GatherQueue::default(),
            presence: Presence::none(fabric.parameters()),
            seen: Vec::new(),
            supply: Supply::default(),
        });
        workings.presence.clear();
        workings.reductions.begin(fabric, &mut finished.sums);
        (workings, finished)
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

    pub(crate) fn keep(&self, workings: Workings) {
        self.0.lock().workings = Some(workings);
    }

    /// Releases the kept memory, and the memory of gradients that still exist as soon as they are dropped.
    pub(crate) fn clear(&self) {
        let mut held = self.0.lock();
        held.generation += 1;
        let former = (held.workings.take(), held.finished.take());
        drop(held);
        drop(former);
    }
}

/// A buffer of the step before, if it has that length; a new one otherwise.
///
/// # Errors
/// If there is no memory for it.
pub(crate) fn sized(
    buffer: Vec<f32>,
    len: usize,
    category: Category,
) -> Result<Vec<f32>, hsdp_kernels::Error> {
    if buffer.len() == len {
        return Ok(buffer);
    }
    let _scope = memory::scope(category);
    hsdp_kernels::zeros(len)
}

/// The finished gradients of a step. When they are dropped, their memory serves another step.
#[derive(Debug)]
pub(crate) struct GradShards {
    finished: Finished,
    recycled: Arc<Recycled>,
    generation: u64,
    /// The step, until an optimizer has taken the gradients, if all ranks have agreed to apply them.
    awaits_update: Option<u64>,
}

impl GradShards {
    pub(crate) fn new(finished: Finished, recycled: &Arc<Recycled>) -> Self {
        let generation = recycled.0.lock().generation;
        Self { finished, recycled: Arc::clone(recycled), generation, awaits_update: None }
    }

    /// Notes that an optimizer should take the gradients.
    pub(crate) fn await_update(&mut self, step: u64) {
        self.awaits_update = Some(step);
    }

    /// Notes that an optimizer has taken the gradients.
    pub(crate) fn taken(&mut self) {
        self.awaits_update = None;
    }

    /// By unit and parameter: whether it got a gradient on any rank in the step.
    pub(crate) fn present(&self) -> &[Vec<bool>] {
        &self.finished.present
    }

    pub(crate) fn present_mut(&mut self) -> &mut [Vec<bool>] {
        &mut self.finished.present
    }
}

impl Deref for GradShards {
    type Target = [Sums];

    fn deref(&self) -> &[Sums] {
        &self.finished.sums
    }
}

impl Drop for GradShards {
    fn drop(&mut self) {
        let mut held = self.recycled.0.lock();
        // A panic ends more than the step, and is told of itself.
        let forgotten = self.awaits_update.filter(|_| !thread::panicking());
        if let (Some(step), Forgotten::None) = (forgotten, held.forgotten) {
            held.forgotten = Forgotten::Step(step);
        }
        // If the gradients of another step are kept already, these are freed.
        if held.finished.is_none() && held.generation == self.generation {
            held.finished = Some(mem::take(&mut self.finished));
        }
    }
}
