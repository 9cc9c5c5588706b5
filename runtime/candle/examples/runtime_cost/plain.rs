//! The plain side: every thread has the whole model, and gradients are added up in shared memory.
//!
//! Each thread adds up and updates one part of the flat parameters, so nothing is computed twice,
//! and nothing is communicated but by reading what another thread has written. That is as little as
//! a data-parallel step can do.

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use candle_core::{CpuStorage, DType, Storage, Tensor};
use hsdp_candle::{Plain, gpt};
use hsdp_kernels::AdamWStep;
use hsdp_sharding::balanced;
use parking_lot::{Mutex, RwLock};

use crate::data::{TOKENS, batch};
use crate::size::MICROBATCHES;
use crate::{Times, Work};

/// What the threads share.
struct Shared {
    barrier: Barrier,
    /// All parameters, one after the other, by name.
    parameters: RwLock<Vec<f32>>,
    /// By rank: its gradients, likewise.
    gradients: Vec<RwLock<Vec<f32>>>,
    /// By rank: the squared norm of its part of the sum.
    squared_norms: Vec<Mutex<f64>>,
}

/// Trains on one thread a rank, and times the steps.
pub(crate) fn run(work: &Work) -> Result<Times, Box<dyn Error>> {
    let ranks = work.mesh.world_size();
    let spec = work.gpt.config().spec();
    let by_name: BTreeMap<_, _> =
        spec.params().map(|(_, param)| (&param.name, gpt::init(param, 0))).collect();
    let parameters = by_name.into_values().flatten().collect::<Vec<f32>>();
    let shared = Shared {
        barrier: Barrier::new(ranks),
        gradients: (0..ranks).map(|_| RwLock::new(vec![0.0; parameters.len()])).collect(),
        squared_norms: (0..ranks).map(|_| Mutex::new(0.0)).collect(),
        parameters: RwLock::new(parameters),
    };
    let times = thread::scope(|scope| {
        let start = |rank| {
            let shared = &shared;
            scope.spawn(move || Rank::new(work, shared, rank).train())
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    let mut all = Vec::new();
    for times in times {
        all.push(times.map_err(|_| "a rank panicked")??);
    }
    Ok(all.swap_remove(0))
}

/// One thread.
struct Rank<'a> {
    work: &'a Work,
    shared: &'a Shared,
    rank: usize,
    /// Of the flat parameters: what this thread adds up and updates.
    part: Range<usize>,
    sum: Vec<f32>,
    first_moment: Vec<f32>,
    second_moment: Vec<f32>,
}

impl<'a> Rank<'a> {
    fn new(work: &'a Work, shared: &'a Shared, rank: usize) -> Self {
        let part = balanced(shared.parameters.read().len(), work.mesh.world_size(), rank);
        let zeros = vec![0.0; part.len()];
        let (sum, first_moment, second_moment) = (zeros.clone(), zeros.clone(), zeros);
        Self { work, shared, rank, part, sum, first_moment, second_moment }
    }

    fn train(mut self) -> candle_core::Result<Times> {
        let mut times = Times::new();
        for step in 0..self.work.steps {
            let start = Instant::now();
            let model = self.model()?;
            for microbatch in 0..MICROBATCHES {
                self.microbatch(&model, step, microbatch)?;
            }
            self.shared.barrier.wait();
            self.add_up();
            self.shared.barrier.wait();
            self.update(step as u64 + 1);
            self.shared.barrier.wait();
            times.push(start.elapsed());
        }
        Ok(times.split_off(1.min(times.len())))
    }

    /// This thread's own copy of the parameters.
    fn model(&self) -> candle_core::Result<Plain> {
        let spec = self.work.gpt.config().spec();
        let flat = self.shared.parameters.read();
        let mut rest = flat.as_slice();
        let sizes: BTreeMap<_, _> =
            spec.params().map(|(_, param)| (param.name.clone(), param.numel())).collect();
        let values = sizes.into_iter().map(|(name, numel)| {
            let (values, others) = rest.split_at(numel);
            rest = others;
            (name, values.to_vec())
        });
        let values = values.collect();
        Plain::new(spec, &values, DType::F32)
    }

    /// Forward and backward; the gradients go into this thread's, or are added to them.
    fn microbatch(&self, model: &Plain, step: usize, microbatch: usize) -> candle_core::Result<()> {
        let (inputs, targets) = batch(step, microbatch, self.rank)?;
        let loss = self.work.gpt.loss(model, &inputs, &targets)?;
        let gradients = (loss * TOKENS as f64)?.backward()?;
        let mut flat = self.shared.gradients[self.rank].write();
        let mut rest = flat.as_mut_slice();
        for var in model.parameters().values() {
            let (target, others) = rest.split_at_mut(var.elem_count());
            rest = others;
            let gradient = gradients
                .get(var)
                .map_or_else(|| var.zeros_like(), |gradient| gradient.contiguous())?;
            read(&gradient, |values| match microbatch {
                0 => target.copy_from_slice(values),
                _ => target.iter_mut().zip(values).for_each(|(total, value)| *total += value),
            });
        }
        Ok(())
    }

    /// Adds up this thread's part over all threads, and divides it.
    fn add_up(&mut self) {
        self.sum.fill(0.0);
        for gradients in &self.shared.gradients {
            let gradients = gradients.read();
            let part = &gradients[self.part.clone()];
            self.sum.iter_mut().zip(part).for_each(|(total, value)| *total += value);
        }
        let weight = TOKENS * (MICROBATCHES * self.work.mesh.world_size()) as u64;
        hsdp_kernels::divide_in_place(&mut self.sum, weight as f64);
        *self.shared.squared_norms[self.rank].lock() = hsdp_kernels::squared_norm(&self.sum);
    }

    /// Clips by the norm of all parts, and updates this thread's.
    fn update(&mut self, step: u64) {
        let norm =
            self.shared.squared_norms.iter().map(|squared| *squared.lock()).sum::<f64>().sqrt();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a factor of at most 1, applied in f32"
        )]
        let clip = (1.0 / (norm + 1e-6)).min(1.0) as f32;
        let adamw = self.work.adamw;
        let step = AdamWStep {
            learning_rate: adamw.learning_rate,
            beta1: adamw.betas.0,
            beta2: adamw.betas.1,
            epsilon: adamw.eps,
            weight_decay: adamw.weight_decay,
            step,
            clip,
        };
        let mut part = self.shared.parameters.read()[self.part.clone()].to_vec();
        hsdp_kernels::adamw(
            &step,
            &mut part,
            &self.sum,
            &mut self.first_moment,
            &mut self.second_moment,
        );
        self.shared.parameters.write()[self.part.clone()].copy_from_slice(&part);
    }
}

/// The values of a contiguous f32 tensor, where they lie.
fn read(tensor: &Tensor, visit: impl FnOnce(&[f32])) {
    let (storage, layout) = tensor.storage_and_layout();
    if let Storage::Cpu(CpuStorage::F32(values)) = &*storage {
        visit(&values[layout.start_offset()..][..tensor.elem_count()]);
    }
}
