//! The space of a search: its candidates, and whether they fit.

use std::fmt;
use std::sync::Arc;

use hsdp_sharding::{
    Accumulation, ByteCount, DType, Mesh, ModelSpec, Offload, Plan, PlanOptions, StateOver,
};
use itertools::{Itertools as _, iproduct};

use crate::host::{Microbatches, ModelPlacement};
use crate::prediction::placement;
use crate::{
    Batch, Computation, Error, Machine, Processor, Recompute, StepMemory, WorkCost, Workload,
};

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
    /// Tokens of a step on all ranks; otherwise several are tried, and steps of different numbers
    /// of tokens are compared.
    pub batch_tokens: Option<u64>,
    /// The parts of the model that may be in the host's memory, beside a device's: each is tried.
    pub offloads: &'a [Offload],
}

/// The computation of a rank in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) batch: Batch,
    pub(super) microbatches: u64,
    /// The most bytes of its activations.
    pub(super) activations: ByteCount,
    /// The cost of a microbatch, without that of reductions.
    pub(super) microbatch: WorkCost,
}

/// The most candidates of a search: it remembers those that fit, by 40 bytes each.
pub(super) const MOST_CANDIDATES: u64 = 1 << 21;

/// The most units and parameters that a search plans or computes the time of, over all plans and
/// batches. Two cores take half a minute.
pub(super) const MOST_PLANNED: u64 = 45_000_000;

/// Slices that take as long as a unit or a parameter, and count as one.
pub(super) const SLICES_FOR_ONE: u64 = 3;

/// The work of a search, but for its simulations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    plans: u64,
    /// Ways to compute the tokens of a step in one dtype.
    pairs: u64,
    pub(super) candidates: u64,
    /// Units and parameters of the model.
    size: u64,
    /// Ways to compute the tokens of a step.
    computed: u64,
    /// Slices of units that differ, over all meshes and dtypes.
    slices: u64,
    /// Units and parameters, over all plans and ways to compute, and the slices that count as them.
    pub(super) planned: u64,
}

impl Space<'_> {
    /// Returns the meshes of the ranks.
    ///
    /// # Errors
    /// [`Error::Plan`] if there is none.
    pub(super) fn meshes(&self) -> Result<Vec<Mesh>, Error> {
        let sizes = (1..=self.ranks).filter(|replicas| self.ranks.is_multiple_of(*replicas));
        Ok(sizes.map(|it| Mesh::new(it, self.ranks / it)).collect::<Result<Vec<Mesh>, _>>()?)
    }

    /// Returns the choices on which a plan depends.
    pub(super) fn plan_choices(&self, meshes: &[Mesh]) -> Vec<PlanChoice> {
        let after_forwards = [AfterForwards::AsDeclared, AfterForwards::Keep];
        let states = |&mesh: &Mesh| states(mesh).iter().map(move |state| (mesh, *state));
        let meshes: Vec<_> = meshes.iter().flat_map(states).collect();
        let choices =
            iproduct!(meshes, self.dtypes(), Accumulation::ALL, PREFETCHES, after_forwards);
        let choice = |((mesh, state), dtypes, accumulation, prefetch, after_forward)| PlanChoice {
            mesh,
            dtypes,
            accumulation,
            prefetch,
            after_forward,
            state,
        };
        choices.map(choice).collect()
    }

    /// Returns how much work a search of `plans` plans on these meshes is, before it begins.
    pub(super) fn estimate(
        &self,
        meshes: &[Mesh],
        plans: usize,
        batches: &[(usize, u64)],
    ) -> Estimate {
        let dtypes = self.param_dtypes().len();
        let plans = plans as u64;
        let pairs = batches.len() as u64 * Recompute::ALL.len() as u64;
        let candidates = plans.saturating_mul(self.offloads.len() as u64).saturating_mul(pairs);
        let size = (self.spec.units().len() + self.spec.params().count()) as u64;
        let computed = pairs * dtypes as u64;
        let slices: u64 = meshes.iter().map(|mesh| slices(self.spec, *mesh)).sum();
        let slices = slices.saturating_mul(dtypes as u64);
        let planned = (plans + computed).saturating_mul(size);
        let planned = planned.saturating_add(slices / SLICES_FOR_ONE);
        Estimate { plans, pairs, candidates, size, computed, slices, planned }
    }

    /// Refuses a search that would take too long, or too much memory, before it begins.
    ///
    /// # Errors
    /// [`Error::SearchTooLarge`].
    pub(super) fn check(
        &self,
        meshes: &[Mesh],
        plans: usize,
        batches: &[(usize, u64)],
    ) -> Result<(), Error> {
        let Self { ranks, .. } = self;
        let Estimate { plans, pairs, candidates, size, computed, slices, planned } =
            self.estimate(meshes, plans, batches);
        if candidates > MOST_CANDIDATES {
            return Err(Error::SearchTooLarge {
                problem: format!(
                    "{candidates} candidates: {plans} plans of {ranks} ranks, {} parts that may be offloaded, and {pairs} ways to compute the tokens of a step; at most {MOST_CANDIDATES} are searched",
                    self.offloads.len()
                ),
            });
        }
        if planned > MOST_PLANNED {
            return Err(Error::SearchTooLarge {
                problem: format!(
                    "{planned} units and parameters: {plans} plans of {ranks} ranks, and {computed} ways to compute the tokens of a step, of a model with {size}, and {slices} slices, {SLICES_FOR_ONE} for one; at most {MOST_PLANNED} are searched"
                ),
            });
        }
        Ok(())
    }

    /// Returns the plan of a choice, of the model with its choice after forwards.
    ///
    /// # Errors
    /// Errors of a plan.
    pub(super) fn plan(&self, choice: &PlanChoice) -> Result<Plan, Error> {
        let [param_dtype, reduce_dtype] = choice.dtypes;
        let options = PlanOptions {
            param_dtype,
            reduce_dtype,
            accumulation: choice.accumulation,
            prefetch: choice.prefetch,
            state: choice.state,
            ..PlanOptions::default()
        };
        Ok(Plan::new(choice.after_forward.applied_to(self.spec), choice.mesh, options)?)
    }

    /// Returns the computation that ranks may have in a step, in each dtype.
    ///
    /// # Errors
    /// [`Error::Computation`].
    pub(super) fn loads(&self, batches: &[(usize, u64)]) -> Result<Vec<Load>, Error> {
        let of_dtype = |dtype| {
            let processor = self.processor(dtype)?;
            let load = |((sequences, microbatches), recompute)| {
                let batch = Batch { sequences, context: self.context, dtype, recompute };
                let microbatch = self.computation.of_microbatch(&batch, &processor);
                let activations = self.computation.most_kept(&batch);
                Load { batch, microbatches, activations, microbatch }
            };
            let loads = iproduct!(batches.iter().copied(), Recompute::ALL);
            Ok(loads.map(load).collect::<Vec<_>>())
        };
        let dtypes = self.param_dtypes().into_iter();
        Ok(dtypes.map(of_dtype).collect::<Result<Vec<_>, Error>>()?.concat())
    }

    /// Returns the processor of a rank.
    ///
    /// # Errors
    /// [`Error::Computation`].
    pub(super) fn processor(&self, dtype: DType) -> Result<Processor, Error> {
        Processor::new(self.machine, dtype, self.ranks)
    }

    /// Sequences of a microbatch, and microbatches of a step.
    ///
    /// # Errors
    /// [`Error::BatchTokens`] if the tokens of a step are no multiple of those of a sequence on
    /// each rank.
    pub(super) fn batches(&self) -> Result<Vec<(usize, u64)>, Error> {
        let Some(tokens) = self.batch_tokens else {
            return Ok(iproduct!(BATCHES, MICROBATCHES).collect());
        };
        let each = self.ranks as u64 * self.context as u64;
        if tokens == 0 || !tokens.is_multiple_of(each) {
            let ranks = self.ranks;
            let context = self.context;
            return Err(Error::BatchTokens { tokens, ranks, context });
        }
        let sequences = tokens / each;
        let counts = (1..=sequences.min(MOST)).filter(|count| sequences.is_multiple_of(*count));
        let split = |count| Some((usize::try_from(sequences / count).ok()?, count));
        let batches = counts.filter_map(split).filter(|(batch, _)| *batch as u64 <= MOST);
        Ok(batches.collect())
    }

    /// Returns the dtypes in which the model may compute.
    pub(super) fn param_dtypes(&self) -> Vec<DType> {
        self.dtypes().into_iter().map(|[param, _]| param).dedup().collect()
    }

    fn dtypes(&self) -> Vec<[DType; 2]> {
        let full = DType::F32;
        let half = DType::BF16;
        match placement(self.machine) {
            ModelPlacement::Host => vec![[full, full], [full, half]],
            ModelPlacement::Device => vec![[half, half], [half, full], [full, full]],
        }
    }

    /// Returns the memory of a rank by a plan, without activations.
    pub(super) fn memory(&self, plan: &Plan, offload: Offload) -> StepMemory {
        StepMemory::of_plan(plan, offload, placement(self.machine))
    }

    /// Returns the bytes of a candidate that fits, those in the host's memory among them, or the
    /// reason for which it does not. `memory` is without activations.
    pub(super) fn fits(&self, memory: StepMemory, load: &Load) -> Result<u64, Unfit> {
        let memory = StepMemory { activations: load.activations, ..memory };
        if memory.total() > self.memory {
            return Err(Unfit::of(&memory));
        }
        if !self.machine.host_holds(memory.offloaded.total(), self.ranks) {
            return Err(Unfit::Host);
        }
        Ok(memory.everywhere().get())
    }

    /// Returns the tokens of a step on all ranks.
    pub(super) fn tokens(&self, load: &Load) -> u64 {
        let sequences = (load.batch.sequences as u64).saturating_mul(load.microbatches);
        sequences.saturating_mul(self.context as u64).saturating_mul(self.ranks as u64)
    }

    /// Returns the step of a candidate.
    pub(super) fn workload(&self, plan: &Arc<Plan>, load: &Load, offload: Offload) -> Workload {
        let microbatches = Microbatches::Given(load.microbatches);
        let plan = Arc::clone(plan);
        let computation = Arc::clone(self.computation);
        Workload { plan, computation, batch: load.batch, microbatches, offload }
    }
}

/// Returns the ranks over which state may be divided on a mesh. With one replica both are the same.
const fn states(mesh: Mesh) -> &'static [StateOver] {
    match mesh.replicate_size() {
        1 => &[StateOver::Shards],
        _ => &StateOver::ALL,
    }
}

/// Returns the number of slices on a mesh for which a plan computes numbers of their own: of each
/// unit those of the ranks whose shards hold other parts of parameters.
fn slices(spec: &ModelSpec, mesh: Mesh) -> u64 {
    let differ = |params: usize| mesh.shard_size().min(4 * params + 1) as u64;
    let of_replica: u64 = spec.units().iter().map(|unit| differ(unit.params.len())).sum();
    match states(mesh) {
        [StateOver::Shards] => 0,
        _ => of_replica.saturating_mul(mesh.replicate_size() as u64),
    }
}

/// Whether units stay gathered from their forward to their backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AfterForwards {
    /// As the model declares.
    AsDeclared,
    /// All of them.
    Keep,
}

impl AfterForwards {
    /// Returns the model with this choice.
    fn applied_to(self, spec: &ModelSpec) -> ModelSpec {
        match self {
            Self::AsDeclared => spec.clone(),
            Self::Keep => spec.clone().all_kept(),
        }
    }
}

/// The choices on which a plan depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanChoice {
    /// The mesh.
    pub mesh: Mesh,
    /// The dtype of gathered parameters, in which the model computes, and that of gradients on the
    /// wire.
    pub dtypes: [DType; 2],
    /// When gradients are reduced.
    pub accumulation: Accumulation,
    /// Units that are gathered ahead.
    pub prefetch: usize,
    /// Whether units stay gathered.
    pub after_forward: AfterForwards,
    /// The ranks over which the state of the optimizer is divided.
    pub state: StateOver,
}

impl PlanChoice {
    /// Returns the dtype in which the model computes.
    pub(super) const fn param_dtype(&self) -> DType {
        self.dtypes[0]
    }
}

/// A choice of mesh and options. Displayed as the options of `hsdp simulate` that choose it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Choice of the plan.
    pub plan: PlanChoice,
    /// The part of a forward that its backward computes again.
    pub recompute: Recompute,
    /// The part that is in the host's memory.
    pub offload: Offload,
    /// Sequences of a rank's microbatch.
    pub batch: usize,
    /// Microbatches of a step.
    pub microbatches: u64,
}

impl Candidate {
    pub(super) fn of(plan: PlanChoice, workload: &Workload) -> Self {
        let Workload { batch, microbatches, offload, .. } = workload;
        Self {
            plan,
            recompute: batch.recompute,
            offload: *offload,
            batch: batch.sequences,
            microbatches: microbatches.count(),
        }
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, recompute, offload, batch, microbatches } = self;
        let PlanChoice { mesh, dtypes: [param, reduce], accumulation, prefetch, .. } = plan;
        write!(f, "--mesh {mesh} --batch {batch} --microbatches {microbatches}")?;
        write!(f, " --param-dtype {param} --reduce-dtype {reduce}")?;
        write!(f, " --accumulation {accumulation} --prefetch {prefetch} --recompute={recompute}")?;
        if plan.after_forward == AfterForwards::Keep {
            f.write_str(" --keep")?;
        }
        if plan.state != StateOver::default() {
            write!(f, " --state-over {}", plan.state)?;
        }
        if *offload != Offload::None {
            write!(f, " --offload {offload}")?;
        }
        Ok(())
    }
}

/// The reason for which a candidate does not fit: the largest part of a rank's memory, or the
/// memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unfit {
    /// A category of the plan's memory, or `activations` or `gradients`.
    Memory(&'static str),
    /// All ranks of a machine together offload more than its host's memory.
    Host,
}

impl Unfit {
    pub(super) fn of(memory: &StepMemory) -> Self {
        let parts = memory.parts();
        let largest = parts.into_iter().rev().max_by_key(|(_, bytes)| *bytes);
        Self::Memory(largest.map_or("", |(name, _)| name))
    }
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(part) => write!(f, "too much memory, the largest part is {part}"),
            Self::Host => f.write_str("too much of the host's memory"),
        }
    }
}
