//! The candidates that fit, in few bytes each.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hsdp_flight::Channel;
use hsdp_sharding::{DType, MemoryPlan, Mesh, Offload, Plan, Rank, StateOver};
use rayon::prelude::*;

use super::Cell;
use super::space::{Load, PlanChoice, Space, Unfit};
use crate::host::{Action, ModelPlacement, Order, StepBlock, Work};
use crate::prediction::{MeshGroups, OnMachine, PlanSizes, check_update, placement, update_cost};
use crate::simulation::Costs;
use crate::{Error, Machine, Processor, StepMemory, Workload};

/// A candidate that fits.
#[derive(Clone, Copy, Debug)]
pub(super) struct FittingCandidate {
    /// Upper bound of its tokens a second.
    pub(super) bound: f64,
    /// Bytes of a rank, those in the host's memory among them.
    pub(super) memory: u64,
    choice: u32,
    load: u32,
    offload: Offload,
}

/// All candidates that fit, in the order in which they are tried, and the number of others.
pub(super) struct FittingCandidates<'a> {
    pub(super) space: &'a Space<'a>,
    pub(super) choices: Vec<PlanChoice>,
    pub(super) loads: Vec<Load>,
    groups: HashMap<Mesh, Arc<MeshGroups>>,
    /// Memory of plans whose replicas divide state, by what it depends on.
    pub(super) divided: HashMap<(Mesh, DType), DividedMemory>,
    pub(super) fits: Vec<FittingCandidate>,
    pub(super) unfit: BTreeMap<Unfit, u64>,
    pub(super) candidates: u64,
}

/// The memory of a plan whose replicas divide state, for each part of the space that may be
/// offloaded. The elements that a rank updates differ from rank to rank, so it takes long to find
/// for many ranks. All of it but `full`, `grad_full` and `partial` depends on the mesh and on the
/// compute dtype alone. These three are those of a plan whose replicas do not divide state.
pub(super) type DividedMemory = Vec<StepMemory>;

/// The candidates of a choice.
#[derive(Default)]
struct ConsideredPart {
    fits: Vec<FittingCandidate>,
    unfit: BTreeMap<Unfit, u64>,
    candidates: u64,
}

impl<'a> FittingCandidates<'a> {
    /// Plans all choices, on all cores.
    ///
    /// # Errors
    /// [`Error::BatchTokens`]; [`Error::SearchTooLarge`]; [`Error::TooManyRanks`]; those of a plan
    /// and of its computation.
    pub(super) fn of(space: &'a Space<'a>) -> Result<Self, Error> {
        let meshes = space.meshes()?;
        let choices = space.plan_choices(&meshes);
        let batches = space.batches()?;
        space.check(&meshes, choices.len(), &batches)?;
        let placed =
            meshes.iter().map(|mesh| Ok((*mesh, Arc::new(MeshGroups::new(*mesh, space.machine)?))));
        let groups = placed.collect::<Result<HashMap<_, _>, Error>>()?;
        let loads = space.loads(&batches)?;
        let divided = divided_memory(space, &choices)?;
        let fits = Vec::new();
        let unfit = BTreeMap::new();
        let candidates = 0;
        let mut fitting = Self { space, choices, loads, groups, divided, fits, unfit, candidates };
        let choices = fitting.choices.par_iter().enumerate();
        let parts: Vec<Result<ConsideredPart, Error>> =
            choices.map(|(index, choice)| fitting.consider(index, choice)).collect();
        for part in parts {
            let part = part?;
            fitting.fits.extend(part.fits);
            fitting.candidates += part.candidates;
            for (unfit, count) in part.unfit {
                *fitting.unfit.entry(unfit).or_default() += count;
            }
        }
        Ok(fitting)
    }

    /// Returns the candidates of a choice.
    fn consider(&self, index: usize, choice: &PlanChoice) -> Result<ConsideredPart, Error> {
        let mut part = ConsideredPart::default();
        let Self { space, loads, .. } = self;
        let machine = space.machine;
        let plan = Arc::new(space.plan(choice)?);
        check_update(&plan)?;
        let of_dtype = || {
            let loads = loads.iter().enumerate();
            loads.filter(|(_, load)| load.batch.dtype == choice.param_dtype())
        };
        let Some((_, first)) = of_dtype().next() else { return Ok(part) };
        let on = placement(machine);
        let processor = space.processor(choice.param_dtype())?;
        let two = Load { microbatches: 2, ..*first };
        let workload = space.workload(&plan, &two, Offload::None);
        let mut cost = None;
        let memories = self.memories(choice, &plan)?;
        for (offload, memory) in space.offloads.iter().zip(memories) {
            let update = update_bound(&workload, *offload, machine, &processor);
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
                    let sizes = PlanSizes::of(&plan, workload.offload)?;
                    let Workload { computation, batch, .. } = &workload;
                    let costs = OnMachine::of(computation, batch, &sizes, machine, groups)?;
                    cost = Some(PlanCost::new(&workload, &costs, on));
                }
                let Some(cost) = &cost else { continue };
                let bound = space.tokens(it) as f64 / cost.seconds(it, update);
                #[expect(clippy::cast_possible_truncation, reason = "there are 2^21 candidates")]
                let choice = index as u32;
                #[expect(clippy::cast_possible_truncation, reason = "there are 2^21 candidates")]
                let load = load as u32;
                part.fits.push(FittingCandidate { bound, memory, choice, load, offload: *offload });
            }
        }
        Ok(part)
    }

    /// Returns the memory of a choice's plan, for each part of the space that may be offloaded.
    fn memories(&self, choice: &PlanChoice, plan: &Plan) -> Result<Vec<StepMemory>, Error> {
        let of_plan = |plan: &Plan| {
            let offloads = self.space.offloads.iter();
            offloads.map(|offload| self.space.memory(plan, *offload)).collect::<Vec<_>>()
        };
        if !plan.divides_state() {
            return Ok(of_plan(plan));
        }
        let like = self.space.plan(&PlanChoice { state: StateOver::Shards, ..*choice })?;
        let divided = &self.divided[&(choice.mesh, choice.param_dtype())];
        let both = divided.iter().zip(of_plan(&like));
        Ok(both.map(|(divided, like)| with_memory_of_step(*divided, like)).collect())
    }

    /// Returns the numbers of all that fit.
    pub(super) fn indices(&self) -> impl Iterator<Item = u32> + use<> {
        #[expect(clippy::cast_possible_truncation, reason = "there are 2^21 candidates")]
        let count = self.fits.len() as u32;
        0..count
    }

    pub(super) fn choice(&self, fit: &FittingCandidate) -> &PlanChoice {
        &self.choices[fit.choice as usize]
    }

    fn load(&self, fit: &FittingCandidate) -> &Load {
        &self.loads[fit.load as usize]
    }

    pub(super) fn tokens(&self, fit: &FittingCandidate) -> u64 {
        self.space.tokens(self.load(fit))
    }

    /// Returns the place of its mesh, and the tokens of a step.
    pub(super) fn kind(&self, fit: &FittingCandidate) -> (usize, u64) {
        (self.choice(fit).mesh.shard_size(), self.tokens(fit))
    }

    pub(super) fn cell(&self, fit: &FittingCandidate) -> Cell {
        let mesh = self.choice(fit).mesh;
        (mesh.replicate_size(), mesh.shard_size(), self.load(fit).microbatches)
    }

    pub(super) fn groups_of(&self, fit: &FittingCandidate) -> &Arc<MeshGroups> {
        &self.groups[&self.choice(fit).mesh]
    }

    /// Returns the step of a candidate, with a plan of its own.
    pub(super) fn workload(&self, fit: &FittingCandidate) -> Result<Workload, Error> {
        let plan = Arc::new(self.space.plan(self.choice(fit))?);
        Ok(self.space.workload(&plan, self.load(fit), fit.offload))
    }
}

/// Plans a choice of each mesh and compute dtype whose replicas divide state, on all cores.
///
/// # Errors
/// Errors of a plan.
fn divided_memory(
    space: &Space<'_>,
    choices: &[PlanChoice],
) -> Result<HashMap<(Mesh, DType), DividedMemory>, Error> {
    let divided = choices.iter().filter(|choice| choice.state == StateOver::World);
    let by_key: HashMap<_, _> =
        divided.map(|choice| ((choice.mesh, choice.param_dtype()), choice)).collect();
    let memory = |(key, choice): ((Mesh, DType), &PlanChoice)| {
        let plan = space.plan(choice)?;
        let of_each = space.offloads.iter().map(|offload| space.memory(&plan, *offload));
        Ok((key, of_each.collect()))
    };
    by_key.into_par_iter().map(memory).collect()
}

/// Returns the memory of a plan whose replicas divide state, with the parts of a step of `like`.
const fn with_memory_of_step(divided: StepMemory, like: StepMemory) -> StepMemory {
    let MemoryPlan { full, grad_full, partial, .. } = like.planned;
    let planned = MemoryPlan { full, grad_full, partial, ..divided.planned };
    StepMemory { planned, ..divided }
}

/// Seconds that a part of a step takes at least: of rank 0's thread, of its device, and of its
/// stream of collectives.
#[derive(Clone, Copy, Debug, Default)]
struct Least {
    host: f64,
    device: f64,
    stream: f64,
}

impl Least {
    fn add(&mut self, other: Self, times: f64) {
        self.host += other.host * times;
        self.device += other.device * times;
        self.stream += other.stream * times;
    }
}

/// Costs that a plan adds to the computation of a step: its operations, and its work on gradients
/// and parameters except the update.
struct PlanCost {
    /// Costs of every microbatch but the last.
    repeated: Least,
    /// Costs of the rest of the step.
    once: Least,
}

/// Times are rounded to picoseconds.
const ROUNDING: f64 = 1.0 - 1e-6;

impl PlanCost {
    /// Returns the costs of a plan, which are those of any of its workloads with two microbatches.
    pub(super) fn new(workload: &Workload, costs: &OnMachine<'_>, on: ModelPlacement) -> Self {
        let order = Order::of(&workload.plan, workload.microbatches, on);
        let mut cost = Self { repeated: Least::default(), once: Least::default() };
        // The block before the last one is a microbatch that is not the last.
        let repeated = order.blocks.len() - 2;
        for (index, block) in order.blocks.iter().enumerate() {
            let least = of_block(block, costs, on);
            if index == repeated { cost.repeated = least } else { cost.once.add(least, 1.0) }
        }
        cost
    }

    /// Returns the least seconds of a step. Each rank has a thread, a device and a stream that do
    /// one thing after the other.
    pub(super) fn seconds(&self, load: &Load, update: Least) -> f64 {
        let microbatch = Least {
            host: load.microbatch.host.seconds(),
            device: load.microbatch.device.seconds(),
            stream: 0.0,
        };
        let mut sum = self.once;
        sum.add(update, 1.0);
        sum.add(microbatch, load.microbatches as f64);
        sum.add(self.repeated, load.microbatches.saturating_sub(1) as f64);
        sum.host.max(sum.device).max(sum.stream) * ROUNDING
    }
}

/// Returns the cost of the update with a part of the model in the host's memory.
fn update_bound(
    workload: &Workload,
    offload: Offload,
    machine: &Machine,
    processor: &Processor,
) -> Least {
    let cost = update_cost(&workload.plan, offload, machine, processor);
    Least { host: cost.host.seconds(), device: cost.device.seconds(), stream: 0.0 }
}

fn of_block(block: &StepBlock, costs: &OnMachine<'_>, on: ModelPlacement) -> Least {
    let mut least = Least::default();
    for action in &block.actions {
        let Action::Compute(work) = action else { continue };
        if matches!(work, Work::Accumulate(_) | Work::Fold(_) | Work::Norm) {
            let cost = costs.work(*work);
            least.host += cost.host.seconds();
            least.device += cost.device.seconds();
        }
    }
    for operation in &block.operations {
        let cost = costs.operation(operation, costs.shape(operation.members, Rank::new(0)));
        least.host += cost.host.seconds();
        match (operation.channel, on) {
            // The thread waits for it.
            (Channel::Control | Channel::Statistics, _) => least.host += cost.link.seconds(),
            (_, ModelPlacement::Device) => least.stream += cost.link.seconds(),
            (_, ModelPlacement::Host) => {}
        }
    }
    least
}
