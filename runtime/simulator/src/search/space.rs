//! The space of a search: its candidates, and whether they fit.

use std::sync::Arc;

use hsdp_sharding::{Accumulation, ByteCount, DType, Mesh, ModelSpec, Offload, Plan, PlanOptions};
use itertools::iproduct;

use super::candidate::{AfterForwards, PlanChoice};
use super::unfit::Unfit;
use crate::order::{Microbatches, Placement};
use crate::prediction::placement;
use crate::{Batch, Computation, Error, Machine, Processor, Recompute, StepMemory, Workload};

/// Units that are gathered ahead, in a search.
const PREFETCHES: [usize; 4] = [0, 1, 2, 4];

/// Sequences of a microbatch and microbatches of a step, where the tokens of a step are not given.
const BATCHES: [usize; 6] = [1, 2, 4, 8, 16, 32];
const MICROBATCHES: [u64; 5] = [1, 2, 4, 8, 16];

/// The most sequences of a microbatch, and microbatches of a step.
const MOST: u64 = 1 << 20;

/// The space of a search: a model on so many ranks of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Space<'a> {
    /// The model, with the states of its optimizer.
    pub spec: &'a ModelSpec,
    /// Its computation.
    pub computation: &'a Arc<Computation>,
    /// The machine.
    pub machine: &'a Machine,
    /// The number of ranks, at least 1.
    pub ranks: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// The memory that a rank may use.
    pub memory: ByteCount,
    /// Tokens of a step on all ranks; otherwise several are tried.
    pub batch_tokens: Option<u64>,
    /// The parts of the model that may be in the host's memory, beside a device's: each is tried.
    pub offloads: &'a [Offload],
}

/// The computation of a rank in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) batch: Batch,
    microbatches: u64,
    /// The most bytes of its activations.
    activations: ByteCount,
    /// The time of its computation without the update, in seconds.
    seconds: f64,
}

impl Space<'_> {
    /// The choices on which a plan depends.
    ///
    /// # Errors
    /// [`Error::Plan`] if there is no mesh of so many ranks.
    pub(super) fn plan_choices(&self) -> Result<Vec<PlanChoice>, Error> {
        let sizes = (1..=self.ranks).filter(|replicas| self.ranks.is_multiple_of(*replicas));
        let meshes = sizes.map(|replicas| Mesh::new(replicas, self.ranks / replicas));
        let meshes = meshes.collect::<Result<Vec<Mesh>, _>>()?;
        let after_forwards = [AfterForwards::AsDeclared, AfterForwards::Keep];
        let choices =
            iproduct!(meshes, self.dtypes(), Accumulation::ALL, PREFETCHES, after_forwards);
        let choice = |(mesh, dtypes, accumulation, prefetch, after_forward)| PlanChoice {
            mesh,
            dtypes,
            accumulation,
            prefetch,
            after_forward,
        };
        Ok(choices.map(choice).collect())
    }

    /// The plan of a choice.
    ///
    /// # Errors
    /// Those of a plan.
    pub(super) fn plan(&self, choice: &PlanChoice) -> Result<Plan, Error> {
        let [param_dtype, reduce_dtype] = choice.dtypes;
        let options = PlanOptions {
            param_dtype,
            reduce_dtype,
            accumulation: choice.accumulation,
            prefetch: choice.prefetch,
            ..PlanOptions::default()
        };
        Ok(Plan::new(choice.after_forward.applied_to(self.spec), choice.mesh, options)?)
    }

    /// The computation that ranks may have in a step, in each dtype.
    ///
    /// # Errors
    /// [`Error::BatchTokens`] if the tokens of a step are no multiple of those of a sequence on each rank; [`Error::Computation`].
    pub(super) fn loads(&self) -> Result<Vec<Load>, Error> {
        let mut dtypes: Vec<DType> = self.dtypes().into_iter().map(|[param, _]| param).collect();
        dtypes.dedup();
        let batches = self.batches()?;
        let of_dtype = |dtype| {
            let processor = Processor::new(self.machine, dtype, self.ranks)?;
            let load = |((sequences, microbatches), recompute)| {
                let batch = Batch { sequences, context: self.context, dtype, recompute };
                let of_microbatch = self.computation.least_time(&batch, &processor);
                let seconds = of_microbatch.seconds() * microbatches as f64;
                let activations = self.computation.most_kept(&batch);
                Load { batch, microbatches, activations, seconds }
            };
            let loads = iproduct!(batches.iter().copied(), Recompute::ALL);
            Ok(loads.map(load).collect::<Vec<_>>())
        };
        Ok(dtypes.into_iter().map(of_dtype).collect::<Result<Vec<_>, Error>>()?.concat())
    }

    /// Sequences of a microbatch, and microbatches of a step.
    fn batches(&self) -> Result<Vec<(usize, u64)>, Error> {
        let Some(tokens) = self.batch_tokens else {
            return Ok(iproduct!(BATCHES, MICROBATCHES).collect());
        };
        let each = self.ranks as u64 * self.context as u64;
        if tokens == 0 || !tokens.is_multiple_of(each) {
            let (ranks, context) = (self.ranks, self.context);
            return Err(Error::BatchTokens { tokens, ranks, context });
        }
        let sequences = tokens / each;
        let counts = (1..=sequences.min(MOST)).filter(|count| sequences.is_multiple_of(*count));
        let split = |count| Some((usize::try_from(sequences / count).ok()?, count));
        let batches = counts.filter_map(split).filter(|(batch, _)| *batch as u64 <= MOST);
        Ok(batches.collect())
    }

    fn dtypes(&self) -> Vec<[DType; 2]> {
        let (full, half) = (DType::F32, DType::BF16);
        match placement(self.machine) {
            Placement::Host => vec![[full, full], [full, half]],
            Placement::Device => vec![[half, half], [half, full], [full, full]],
        }
    }

    /// The memory of a rank by a plan, without activations.
    pub(super) fn memory(&self, plan: &Plan, offload: Offload) -> StepMemory {
        StepMemory::of_plan(plan, offload, placement(self.machine))
    }

    /// The most tokens a second of a candidate that fits, or the reason for which it does not. `memory` is without activations.
    pub(super) fn fits(&self, memory: StepMemory, load: &Load) -> Result<f64, Unfit> {
        let memory = StepMemory { activations: load.activations, ..memory };
        if memory.total() > self.memory {
            return Err(Unfit::of(&memory));
        }
        if !self.machine.host_holds(memory.offloaded.total(), self.ranks) {
            return Err(Unfit::Host);
        }
        let tokens = load.batch.sequences as f64 * self.context as f64 * load.microbatches as f64;
        Ok(tokens * self.ranks as f64 / load.seconds)
    }

    /// The step of a candidate.
    pub(super) fn workload(&self, plan: &Arc<Plan>, load: &Load, offload: Offload) -> Workload {
        let microbatches = Microbatches::Given(load.microbatches);
        let (plan, computation) = (Arc::clone(plan), Arc::clone(self.computation));
        Workload { plan, computation, batch: load.batch, microbatches, offload }
    }
}
