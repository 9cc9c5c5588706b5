//! The constant parts of an engine: the plan, the options, the groups in which this rank takes
//! part, and the model's identity. Beside them the errors of its operations, and reports on
//! parameters without a gradient.

use std::iter;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use hsdp_comm::{Channel, Group, ModelLabel, Part, PartKind, Stage, Tag, World};
use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::memory::{self, Category, Scope};
use hsdp_sharding::step::{Rules, Sequences};
use hsdp_sharding::{Axis, DType, FullCopies, Offload, ParamId, Piece, Plan, Rank, UnitId};

use crate::error::Error;
use crate::options::{ModelOptions, Unused, digest};
use crate::state::control::Control;
use crate::state::events::EventLog;
use crate::state::full_pool::FullPool;
use crate::state::masters::HeldMasters;
use crate::state::model_device::ModelDevice;

/// The plan, the options, and this rank's groups.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) world: World,
    /// Number and name of the model, from the moment when all ranks have agreed on them. All its
    /// operations carry them.
    pub(crate) label: Option<ModelLabel>,
    /// Number of the average that stands in for the parameters, or [`OWN_PARAMETERS`].
    stand_in: AtomicU32,
    /// The plan as declared.
    pub(crate) plan: Arc<Plan>,
    /// The plan in the order of units that all ranks have kept.
    settled: OnceLock<Arc<Plan>>,
    pub(crate) options: ModelOptions,
    /// The digest of the options.
    pub(crate) options_digest: u64,
    /// The digest of the options and the plan, which every header has.
    pub(crate) digest: u64,
    /// The shard group, or the world where ranks share their full copies. Gathers and reductions
    /// are two sequences, so that neither waits for the other's turn.
    pub(crate) gather: Group,
    pub(crate) reduce: Group,
    pub(crate) all_reduce: Group,
    /// All ranks, which exchange data in updates.
    over_world: Group,
    /// All ranks, which sum statistics.
    pub(crate) statistics: Group,
    pub(crate) control: Control,
    /// Gathers for export, outside any step: over the shard group, and of slices over the replicas.
    pub(crate) export: Group,
    pub(crate) export_slices: Group,
    pub(crate) events: EventLog,
    pub(crate) unused: UnusedReports,
    /// Checkpoints of this model that may save have a handle each.
    pub(crate) checkpoint_writers: Arc<()>,
    /// The source of the gathers' buffers.
    pub(crate) full_pool: Arc<FullPool>,
    /// Where this rank's part of the model lies, if not on the host.
    pub(crate) device: Option<Arc<ModelDevice>>,
    /// The ends of the slices of replicas in this rank's shard of each unit, behind a 0.
    cuts: Vec<Arc<[usize]>>,
    /// The number in the model of each unit's first parameter, and the count of all parameters.
    first_parameter: Vec<usize>,
}

/// No average stands in for the parameters. Averages are numbered from 1.
const OWN_PARAMETERS: u32 = 0;

impl Context {
    pub(crate) fn new(world: World, plan: Arc<Plan>, options: ModelOptions) -> Result<Self, Error> {
        let mesh = plan.mesh();
        let options_digest = options.digest();
        let shard_group = mesh.group(Axis::Shard, world.rank());
        let replicate_group = mesh.group(Axis::Replicate, world.rank());
        let gather = match options.full_copies {
            FullCopies::PerRank => world.group(&shard_group, Channel::Gather)?,
            FullCopies::PerProcess => world.world_group(Channel::Gather),
        };
        // Where others are processes, the host waits for their parts: the deadline of the world is
        // to end that, with a name.
        let factor = if world.shares_memory() { 1 } else { 2 };
        let patience = world.deadline().saturating_mul(factor);
        let device = ModelDevice::of(options.placement, patience, &plan)?;
        let reduce = world.group(&shard_group, Channel::Reduce)?;
        let all_reduce = world.group(&replicate_group, Channel::AllReduce)?;
        if let Some(device) = &device {
            device.connect(&world, &[&gather, &reduce, &all_reduce])?;
        }
        Ok(Self {
            label: None,
            stand_in: AtomicU32::new(OWN_PARAMETERS),
            gather,
            device,
            reduce,
            all_reduce,
            over_world: world.world_group(Channel::Reduce),
            statistics: world.world_group(Channel::Statistics),
            control: Control::new(&world),
            export: world.group(&shard_group, Channel::Control)?,
            export_slices: world.group(&replicate_group, Channel::Control)?,
            events: EventLog::default(),
            unused: UnusedReports::default(),
            checkpoint_writers: Arc::default(),
            full_pool: Arc::new(FullPool::new(plan.memory().full)),
            first_parameter: first_parameters(&plan),
            cuts: cuts(&plan, &replicate_group),
            digest: digest::of_words([options_digest, plan.fingerprint()]),
            settled: OnceLock::new(),
            options_digest,
            world,
            plan,
            options,
        })
    }

    /// Takes the number and the name on which all ranks have agreed. From now on the model's
    /// gathers and reductions are sequences of their own, so that steps of several models may be
    /// open at a time: the moment at which an all-reduce is issued varies. Where NCCL carries
    /// operations, they are issued in one order, and models share its communicators.
    pub(crate) fn take_label(&mut self, label: ModelLabel) {
        self.label = Some(label);
        self.statistics = self.statistics.of_model(label.number);
        self.over_world = self.over_world.of_model(label.number);
        if !self.issues_in_one_order() {
            for group in [&mut self.gather, &mut self.reduce, &mut self.all_reduce] {
                *group = group.of_model(label.number);
            }
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        self.world.rank()
    }

    /// Returns whether the order in which a rank issues operations must follow from the plan alone,
    /// over all channels, and not from work that may be done earlier on one rank than on another.
    /// This is so where processes launch on devices (`comm/NCCL.md`, "One order").
    pub(crate) fn issues_in_one_order(&self) -> bool {
        self.device.is_some() && !self.world.shares_memory()
    }

    /// Returns the rules of the order of steps.
    pub(crate) fn rules(&self) -> Rules {
        let is_one = self.issues_in_one_order();
        self.options.rules(if is_one { Sequences::One } else { Sequences::OfEachChannel })
    }

    /// Keeps the order of the units on which all ranks have agreed.
    pub(crate) fn settle(&self, plan: &Arc<Plan>) {
        self.settled.get_or_init(|| Arc::clone(plan));
    }

    /// Returns the plan in the order that all ranks have kept; as declared before that.
    pub(crate) fn settled_plan(&self) -> &Plan {
        self.settled.get().unwrap_or(&self.plan)
    }

    /// Returns this rank's word for [`check_operations`](Self::check_operations).
    pub(crate) fn operations_word(&self) -> [u64; 2] {
        self.world.operations_word(&self.groups())
    }

    /// Checks that all ranks have issued the same operations on devices: `total` is the sum of
    /// their words, each taken after the same operations. If it is not 0, the ranks look for the
    /// first difference, and the world ends.
    pub(crate) fn check_operations(&self, total: u128) -> Result<(), Error> {
        match total {
            0 => Ok(()),
            _ => Ok(self.world.compare_operations(&self.groups())?),
        }
    }

    fn groups(&self) -> [&Group; 3] {
        [&self.gather, &self.reduce, &self.all_reduce]
    }

    /// Returns whether shards are updated on a device.
    pub(crate) fn updates_on_device(&self) -> bool {
        self.update_device().is_some()
    }

    /// Returns the device on which shards are updated; `None` if they are updated on the host.
    pub(crate) fn update_device(&self) -> Option<&Arc<ModelDevice>> {
        self.device.as_ref().filter(|device| device.offload == Offload::None)
    }

    /// Returns the ranks that exchange matrices in an update, since together they update each
    /// element once.
    pub(crate) fn updaters(&self) -> &Group {
        match self.plan.divides_state() {
            true => &self.over_world,
            false => &self.reduce,
        }
    }

    /// Returns all ranks, which add up sums in an update.
    pub(crate) fn over_world(&self) -> &Group {
        &self.over_world
    }

    /// Returns the elements of a unit's shard that this rank updates.
    pub(crate) fn updated(&self, unit: UnitId) -> Range<usize> {
        self.plan.updated(unit, self.rank())
    }

    /// Returns the pieces of parameters that this rank updates in its shard of a unit.
    pub(crate) fn updated_pieces(&self, unit: UnitId) -> impl Iterator<Item = Piece> {
        self.plan.updated_pieces(unit, self.rank())
    }

    /// Returns the trained elements of a unit's shard that have an f32 master on this rank: all of
    /// them if they are gathered from the masters, and otherwise those that it updates.
    pub(crate) fn held(&self, unit: UnitId) -> HeldMasters {
        let all = self.plan.layout(unit).trainable().shard_len;
        let is_offloaded = self.device.as_ref().is_some_and(|it| it.offload == Offload::All);
        let is_gathered = self.plan.compute_dtype(unit) == DType::F32 && !is_offloaded;
        let are_divided = self.plan.divides_state() && !is_gathered;
        HeldMasters {
            trained: if are_divided { self.updated(unit) } else { 0..all },
            all,
            are_divided,
        }
    }

    /// Returns where the slices of replicas begin in this rank's shard of a unit, and the end of
    /// the last one.
    pub(crate) fn cuts(&self, unit: UnitId) -> Arc<[usize]> {
        Arc::clone(&self.cuts[unit.index()])
    }

    /// Returns the memory scope of f32 parameters on the host from which a unit's shard is made.
    /// They stay there, or go on to a device, or only some of them stay.
    pub(crate) fn scope_of_parameters(&self, unit: UnitId) -> Scope {
        let stay = self.device.as_ref().is_none_or(|device| device.offload == Offload::All);
        let stay = stay && self.plan.layout(unit).stored().is_none();
        let HeldMasters { trained, all, .. } = self.held(unit);
        let stay = stay && trained.len() == all;
        memory::scope(if stay { Category::Shard } else { Category::Other })
    }

    /// Returns whether there are checkpoints of this model that may save.
    pub(crate) fn is_saved(&self) -> bool {
        Arc::strong_count(&self.checkpoint_writers) > 1
    }

    /// Returns how many parameters the model has.
    pub(crate) fn parameters(&self) -> usize {
        self.first_parameter[self.first_parameter.len() - 1]
    }

    /// Returns the number of a parameter in the model.
    pub(crate) fn number_of(&self, parameter: ParamId) -> usize {
        self.first_parameter[parameter.unit.index()] + parameter.index
    }

    /// Returns the parameter with this number in the model.
    pub(crate) fn parameter(&self, number: usize) -> ParamId {
        let unit = self.first_parameter.partition_point(|first| *first <= number) - 1;
        ParamId { unit: UnitId::new(unit), index: number - self.first_parameter[unit] }
    }

    /// Returns the name of the parameter with this number in the model, or the number if a peer has
    /// sent one that no parameter has.
    pub(crate) fn name_of(&self, number: usize) -> String {
        if number >= self.parameters() {
            return format!("number {number} of {}", self.parameters());
        }
        let id = self.parameter(number);
        self.plan.spec()[id.unit].params[id.index].name.clone()
    }

    /// Returns the number in the model of the parameter that holds an element of this rank's shard;
    /// `None` in padding.
    pub(crate) fn parameter_at(&self, unit: UnitId, at: usize) -> Option<usize> {
        let holds = |piece: &Piece| piece.shard_range().contains(&at);
        let index = self.pieces(unit).find(holds)?.param;
        Some(self.number_of(ParamId { unit, index }))
    }

    /// Returns the place of this rank's shards in their group.
    pub(crate) fn shard_index(&self) -> usize {
        self.plan.mesh().coordinate(self.rank()).shard_index
    }

    /// Returns the pieces of parameters in this rank's shard of a unit.
    pub(crate) fn pieces(&self, unit: UnitId) -> impl Iterator<Item = Piece> {
        self.plan.layout(unit).pieces(self.shard_index())
    }

    pub(crate) fn misuse(&self, operation: &'static str, step: u64, what: String) -> Error {
        Error::Misuse { operation, rank: self.rank(), step, what }
    }

    /// Returns a call and its step, for the errors that name them.
    pub(crate) fn site(&self, operation: &'static str, step: u64) -> ErrorSite<'_> {
        ErrorSite { context: self, operation, step }
    }

    pub(crate) fn tag(
        &self,
        unit: Option<UnitId>,
        stage: Stage,
        step: u64,
        microbatch: usize,
    ) -> Tag {
        let mut tag = Tag::new(stage).step(step).microbatch(microbatch);
        tag.model = self.label;
        tag.unit = unit;
        match self.stand_in.load(Ordering::Relaxed) {
            OWN_PARAMETERS => tag,
            number => tag.part(Part { kind: PartKind::Average, number }),
        }
    }

    /// Returns the tag of a gather of the model's own slices of a unit, also while an average
    /// stands in for the parameters.
    pub(crate) fn tag_of_slices(&self, unit: UnitId, step: u64) -> Tag {
        let mut tag = Tag::new(Stage::GatherSlices).step(step);
        (tag.model, tag.unit) = (self.label, Some(unit));
        tag
    }

    /// Has operations carry the number of the average that stands in for the parameters, until
    /// [`restore`](Self::restore) is called.
    pub(crate) fn stand_in(&self, average: u32) {
        self.stand_in.store(average, Ordering::Relaxed);
    }

    /// Has operations be of the model's own parameters again.
    pub(crate) fn restore(&self) {
        self.stand_in.store(OWN_PARAMETERS, Ordering::Relaxed);
    }

    /// Returns the tag of an exchange of the optimizer that updates `first` and later parameters.
    /// No two optimizers of an update have the same first one. One without parameters has the
    /// number after the last parameter.
    pub(crate) fn tag_of_update(&self, first: Option<ParamId>, step: u64) -> Tag {
        let number = first.map_or_else(|| self.parameters(), |first| self.number_of(first));
        let number = u32::try_from(number).unwrap_or(u32::MAX);
        self.tag(None, Stage::Update, step, 0).part(Part { kind: PartKind::Optimizer, number })
    }
}

/// The call and the step that errors name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorSite<'a> {
    pub(crate) context: &'a Context,
    pub(crate) operation: &'static str,
    pub(crate) step: u64,
}

impl ErrorSite<'_> {
    /// Returns the error of a device. If it is fatal, the world ends.
    pub(crate) fn device(&self, error: CudaError) -> Error {
        let Self { context, operation, step } = *self;
        let error = Error::Device { operation, rank: context.rank(), step, error };
        if error.is_fatal() {
            context.world.abort(&error.to_string());
        }
        error
    }

    /// Returns an error of the kernels; if memory was missing, with the operation and the unit.
    pub(crate) fn memory(&self, unit: UnitId, error: hsdp_kernels::Error) -> Error {
        let hsdp_kernels::Error::OutOfMemory { bytes } = error else { return error.into() };
        let Self { context, operation, step } = *self;
        let unit = context.plan.spec()[unit].name.clone();
        Error::OutOfMemory { operation, unit, rank: context.rank(), step, bytes }
    }
}

/// Returns the ends of the slices of these replicas in each unit, behind a 0.
fn cuts(plan: &Plan, replicas: &[Rank]) -> Vec<Arc<[usize]>> {
    let of_unit = |unit| {
        let ends = replicas.iter().map(|rank| plan.slice(unit, *rank).end);
        iter::once(0).chain(ends).collect()
    };
    plan.spec().unit_ids().map(of_unit).collect()
}

fn first_parameters(plan: &Plan) -> Vec<usize> {
    let mut first = vec![0];
    for unit in plan.spec().units() {
        first.push(first[first.len() - 1] + unit.params.len());
    }
    first
}

/// The identity of a model in this process.
#[derive(Clone, Debug)]
pub struct ModelId(Arc<()>);

impl ModelId {
    pub(crate) fn new() -> Self {
        Self(Arc::new(()))
    }
}

impl PartialEq for ModelId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ModelId {}

/// The words and the state of the reports on parameters without a gradient.
#[derive(Debug, Default)]
pub(crate) struct UnusedReports {
    /// Usual causes, from the adapter of an autograd.
    causes: OnceLock<&'static str>,
    /// Whether the check of the first step is over, which it is on all ranks or on none.
    checked: AtomicBool,
    /// Whether the model was loaded after updates.
    trained: AtomicBool,
    /// Whether zeros have stood for missing gradients on this rank.
    has_cuts: AtomicBool,
}

impl UnusedReports {
    pub(crate) fn set_causes(&self, causes: &'static str) {
        self.causes.get_or_init(|| causes);
    }

    pub(crate) fn causes(&self) -> String {
        self.causes.get().map_or_else(String::new, |causes| format!("; {causes}"))
    }

    /// Notes a load of a checkpoint after this number of applied updates.
    pub(crate) fn note_load(&self, applied: u64) {
        self.trained.store(applied > 0, Ordering::Relaxed);
    }

    /// Returns whether the model was trained before it was loaded.
    pub(crate) fn is_trained(&self) -> bool {
        self.trained.load(Ordering::Relaxed)
    }

    pub(crate) fn note_cuts(&self) {
        self.has_cuts.store(true, Ordering::Relaxed);
    }

    pub(crate) fn seeks_cuts(&self, policy: Unused) -> bool {
        policy == Unused::ErrorOnAnyRank
            || !self.is_checked()
            || self.has_cuts.load(Ordering::Relaxed)
    }

    /// Returns whether the first step was checked.
    pub(crate) fn is_checked(&self) -> bool {
        self.checked.load(Ordering::Relaxed)
    }

    pub(crate) fn set_checked(&self) {
        self.checked.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::{Mesh, ModelSpec, Param, Unit};

    use super::*;

    #[test]
    fn a_number_that_no_parameter_has_is_named_by_itself() {
        let spec = ModelSpec::new().unit(Unit::new("a").param(Param::new("w", [4])));
        let options = ModelOptions::on(Mesh::SINGLE);
        let plan = Plan::new(spec, Mesh::SINGLE, options.plan_options()).expect("a plan");
        let context = Context::new(World::single(), Arc::new(plan), options).expect("a context");
        assert_eq!(
            [0, 1, 7].map(|it| context.name_of(it)),
            ["w", "number 1 of 1", "number 7 of 1"]
        );
    }
}
