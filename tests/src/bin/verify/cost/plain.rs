//! The plain side: every thread has the whole model, and gradients are added up in shared memory.
//!
//! Each thread adds up and updates one part of the flat parameters, so no result is computed twice,
//! and threads communicate only by reading memory that another thread has written. A step copies
//! the model once, into the variables that a thread keeps, and its gradients once, into a buffer
//! that the others read. That is as little as a data-parallel step can do.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::Barrier;
use std::thread;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Device, Storage, Tensor};
use hsdp::{Precision, Rank};
use hsdp_candle::Plain;
use hsdp_models::gpt;
use hsdp_train::{Failure, Place};
use parking_lot::{Mutex, RwLock};
use tracing::info_span;

use super::parts::Parts;
use super::{Times, Work, timed};
use crate::NAME;
use crate::gpt::unsharded::adamw_step;
use crate::train_gpt;

/// The state that the threads share.
struct Shared {
    barrier: Barrier,
    /// All parameters, one after the other, by name.
    parameters: Parts,
    /// Gradients of each rank, in the same order.
    gradients: Vec<RwLock<Vec<f32>>>,
    /// Squared norm of each rank's part of the sum.
    squared_norms: Vec<Mutex<f64>>,
}

/// Trains on one thread a rank, and times the steps.
pub(super) fn run(work: &Work) -> Result<Times, Failure> {
    let ranks = work.mesh.world_size();
    let initial = initial(work);
    let flat: Vec<f32> = initial.values().flatten().copied().collect();
    let shared = Shared {
        barrier: Barrier::new(ranks),
        gradients: (0..ranks).map(|_| RwLock::new(vec![0.0; flat.len()])).collect(),
        squared_norms: (0..ranks).map(|_| Mutex::new(0.0)).collect(),
        parameters: Parts::cut(&flat, ranks),
    };
    let times = thread::scope(|scope| {
        let start = |rank| {
            let shared = &shared;
            let initial = &initial;
            scope.spawn(move || or_give_up(|| Thread::new(work, shared, initial, rank)?.train()))
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let first = times.into_iter().next().and_then(Result::ok);
    first.ok_or_else(|| Failure::work("rank 0 panicked"))
}

/// Runs `rank`, and returns its times. A failure ends the process, because the others would wait at
/// the barrier forever.
fn or_give_up(rank: impl FnOnce() -> Result<Times, Failure>) -> Times {
    let give_up = |what: &dyn Display| -> ! {
        hsdp_train::tell(NAME, format_args!("a rank of the plain side failed: {what}"));
        process::exit(1)
    };
    match catch_unwind(AssertUnwindSafe(rank)) {
        Ok(Ok(times)) => times,
        Ok(Err(error)) => give_up(&error),
        Err(_) => give_up(&"it panicked"),
    }
}

fn initial(work: &Work) -> BTreeMap<String, Vec<f32>> {
    let spec = work.inputs.gpt.config().spec();
    let seed = work.options.seed;
    spec.params().map(|(_, param)| (param.name.clone(), gpt::init(param, seed))).collect()
}

/// The state of one thread.
struct Thread<'a> {
    work: &'a Work,
    shared: &'a Shared,
    rank: usize,
    /// This thread's own copy of the parameters.
    model: Plain,
    /// The range of the flat parameters that this thread adds up and updates.
    part: Range<usize>,
    sum: Vec<f32>,
    first_moment: Vec<f32>,
    second_moment: Vec<f32>,
}

impl<'a> Thread<'a> {
    fn new(
        work: &'a Work,
        shared: &'a Shared,
        initial: &BTreeMap<String, Vec<f32>>,
        rank: usize,
    ) -> candle_core::Result<Self> {
        let model = Plain::new(work.inputs.gpt.config().spec(), initial, Precision::default())?;
        let part = shared.parameters.range(rank);
        let zeros = vec![0.0; part.len()];
        let sum = zeros.clone();
        let first_moment = zeros.clone();
        let second_moment = zeros;
        Ok(Self { work, shared, rank, model, part, sum, first_moment, second_moment })
    }

    fn train(mut self) -> Result<Times, Failure> {
        let work = self.work;
        timed(work, |step| Ok(self.step(step)?))
    }

    fn step(&mut self, step: u64) -> candle_core::Result<()> {
        let microbatches = 0..self.work.options.run.microbatches;
        let own = microbatches.map(|microbatch| self.microbatch(step, microbatch));
        self.collect(&own.collect::<candle_core::Result<Vec<_>>>()?)?;
        self.meet();
        info_span!("exchange").in_scope(|| self.add_up());
        self.meet();
        info_span!("optimizer").in_scope(|| self.update(step + 1));
        self.meet();
        info_span!("copy").in_scope(|| self.refresh())
    }

    /// Waits for the other threads.
    fn meet(&self) {
        info_span!("meet").in_scope(|| self.shared.barrier.wait());
    }

    /// Computes the gradients of a microbatch.
    fn microbatch(&self, step: u64, microbatch: usize) -> candle_core::Result<GradStore> {
        let Work { options, inputs, .. } = self.work;
        let place = Place { step, microbatch, rank: Rank::new(self.rank) };
        let [tokens, targets] = train_gpt::batch(options, &inputs.text, place, &Device::Cpu)?;
        let forward = || inputs.gpt.loss(&self.model, &tokens, &targets);
        let loss = info_span!("forward").in_scope(forward)?;
        info_span!("backward").in_scope(|| (loss * options.tokens() as f64)?.backward())
    }

    /// Adds up this thread's gradients, in the buffer that all threads read.
    fn collect(&self, gradients: &[GradStore]) -> candle_core::Result<()> {
        let _span = info_span!("copy").entered();
        let mut flat = self.shared.gradients[self.rank].write();
        let mut rest = flat.as_mut_slice();
        for var in self.model.parameters().values() {
            let (target, others) = rest.split_at_mut(var.elem_count());
            rest = others;
            for (microbatch, gradients) in gradients.iter().enumerate() {
                let gradient =
                    gradients.get(var).map_or_else(|| var.zeros_like(), Tensor::contiguous)?;
                read(&gradient, |values| match microbatch {
                    0 => target.copy_from_slice(values),
                    _ => target.iter_mut().zip(values).for_each(|(total, value)| *total += value),
                });
            }
        }
        Ok(())
    }

    /// Adds up this thread's part over all threads, and divides it.
    fn add_up(&mut self) {
        for (rank, gradients) in self.shared.gradients.iter().enumerate() {
            let gradients = gradients.read();
            let part = &gradients[self.part.clone()];
            match rank {
                0 => self.sum.copy_from_slice(part),
                _ => self.sum.iter_mut().zip(part).for_each(|(total, value)| *total += value),
            }
        }
        let Work { options, mesh, .. } = self.work;
        let weight = options.tokens() * (options.run.microbatches * mesh.world_size()) as u64;
        hsdp::kernels::divide_in_place(&mut self.sum, weight as f64);
        *self.shared.squared_norms[self.rank].lock() = hsdp::kernels::squared_norm(&self.sum);
    }

    /// Clips by the norm of all parts, and updates this thread's part.
    fn update(&mut self, step: u64) {
        let squares = self.shared.squared_norms.iter().map(|squared| *squared.lock());
        let mut adamw = train_gpt::recipe(&self.work.options);
        adamw.learning_rate = train_gpt::rate(&self.work.options).at(step - 1);
        let step = adamw_step(&adamw, step, squares.sum::<f64>().sqrt());
        hsdp::kernels::adamw(
            &step,
            &mut self.shared.parameters.of(self.rank),
            &self.sum,
            &mut self.first_moment,
            &mut self.second_moment,
        );
    }

    /// Copies all parts into this thread's variables.
    fn refresh(&self) -> candle_core::Result<()> {
        let mut start = 0;
        for var in self.model.parameters().values() {
            self.shared.parameters.copy_to(var, start)?;
            start += var.elem_count();
        }
        Ok(())
    }
}

/// Lends the values of a contiguous f32 tensor to `visit`, without a copy.
fn read(tensor: &Tensor, visit: impl FnOnce(&[f32])) {
    let (storage, layout) = tensor.storage_and_layout();
    if let Storage::Cpu(CpuStorage::F32(values)) = &*storage {
        visit(&values[layout.start_offset()..][..tensor.elem_count()]);
    }
}
