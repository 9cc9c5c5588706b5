//! Buffers of reductions on their way from one step to the next: fresh ones would cost a pass of zeros.

use std::mem;
use std::ops::Deref;
use std::sync::Arc;

use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::Plan;
use parking_lot::Mutex;

use crate::engine::sums::Sums;
use crate::engine::unsharded::UnshardedGradients;

/// What the reductions of a step work in.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// By unit; empty where there is none yet.
    pub(crate) partials: Vec<Sums>,
    /// Mode `Every` with replicas, by unit: what a microbatch's reduce-scatters give.
    pub(crate) transients: Vec<Sums>,
    /// Mode `Local`.
    pub(crate) unsharded: UnshardedGradients,
}

impl Buffers {
    fn none(plan: &Plan) -> Self {
        let units = plan.spec().units().len();
        Self {
            partials: (0..units).map(|_| Sums::default()).collect(),
            transients: (0..units).map(|_| Sums::default()).collect(),
            unsharded: UnshardedGradients::new(plan),
        }
    }
}

/// Where the buffers of one model lie between its steps.
#[derive(Debug)]
pub(crate) struct Recycled {
    plan: Arc<Plan>,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    buffers: Buffers,
    /// How often everything was let go.
    generation: u64,
}

impl Recycled {
    pub(crate) fn new(plan: &Arc<Plan>) -> Self {
        let held = Held { buffers: Buffers::none(plan), generation: 0 };
        Self { plan: Arc::clone(plan), held: Mutex::new(held) }
    }

    /// What lies here, for a step.
    pub(crate) fn take(&self) -> Buffers {
        mem::replace(&mut self.held.lock().buffers, Buffers::none(&self.plan))
    }

    /// Lets go of what lies here, and of gradients that are still held, as soon as they are dropped.
    pub(crate) fn clear(&self) {
        self.held.lock().generation += 1;
        drop(self.take());
    }

    pub(crate) fn keep_transients(&self, transients: Vec<Sums>) {
        self.held.lock().buffers.transients = transients;
    }

    pub(crate) fn keep_unsharded(&self, unsharded: UnshardedGradients) {
        self.held.lock().buffers.unsharded = unsharded;
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

/// This rank's shards of a gradient, by unit; empty for units without any. They are recycled when they are dropped.
#[derive(Debug)]
pub(crate) struct GradShards {
    shards: Vec<Sums>,
    recycled: Arc<Recycled>,
    generation: u64,
}

impl GradShards {
    pub(crate) fn new(shards: Vec<Sums>, recycled: &Arc<Recycled>) -> Self {
        let generation = recycled.held.lock().generation;
        Self { shards, recycled: Arc::clone(recycled), generation }
    }
}

impl Deref for GradShards {
    type Target = [Sums];

    fn deref(&self) -> &[Sums] {
        &self.shards
    }
}

impl Drop for GradShards {
    fn drop(&mut self) {
        let mut held = self.recycled.held.lock();
        // Where another step's lie already, these are too many.
        let is_free = held.buffers.partials.iter().all(Sums::is_empty);
        if is_free && held.generation == self.generation {
            held.buffers.partials = mem::take(&mut self.shards);
        }
    }
}
