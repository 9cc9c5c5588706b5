//! The costs of a step's actions on a machine.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use hsdp_flight::{Channel, Op, Stage};
use hsdp_sharding::{Axis, DType, Mesh, Offload, Param, Plan, Rank, Role, State, UnitId};

use crate::collective::exchange_time;
use crate::computation::update_bytes;
use crate::host::{Members, StepOperation, Work};
use crate::simulation::{Colors, Costs, OperationCost, WorkCost};
use crate::{
    Batch, CollectiveKind, Computation, Error, Level, Machine, Processor, Shape, Shapes, Time,
    collective_cost,
};

/// The groups of a mesh on a machine, and the colors of its ranks. All workloads on this mesh share
/// them.
#[derive(Debug)]
pub(crate) struct MeshGroups {
    /// Shapes that differ.
    shapes: Vec<Shape>,
    /// The number of a group's shape, by axis, and by index on the other one.
    of_axis: [Vec<usize>; 2],
    world: usize,
    shard_size: usize,
    /// The colors of all ranks.
    pub(crate) colors: Colors,
}

impl MeshGroups {
    /// Places the ranks of a mesh.
    ///
    /// # Errors
    /// [`Error::TooManyRanks`] if the machine has too few cards and no network.
    pub(crate) fn new(mesh: Mesh, machine: &Machine) -> Result<Self, Error> {
        let placed = Shapes::new(mesh, machine)?;
        let mut numbers: HashMap<Shape, usize> = HashMap::new();
        let mut shapes = Vec::new();
        let mut number = |shape: Shape| {
            *numbers.entry(shape).or_insert_with_key(|shape| {
                shapes.push(shape.clone());
                shapes.len() - 1
            })
        };
        let firsts = |count: usize, step: usize| (0..count).map(move |it| Rank::new(it * step));
        let shard = firsts(mesh.replicate_size(), mesh.shard_size());
        let shard = shard.map(|rank| number(placed.group(Axis::Shard, rank))).collect();
        let replicate = firsts(mesh.shard_size(), 1);
        let replicate = replicate.map(|rank| number(placed.group(Axis::Replicate, rank))).collect();
        let world = number(placed.world());
        let shard_size = mesh.shard_size();
        let of_axis = [shard, replicate];
        let shape = |members, first| shape(&of_axis, world, shard_size, members, first);
        let colors = Colors::of(mesh, &shape);
        Ok(Self { shapes, of_axis, world, shard_size, colors })
    }
}

/// Returns the number of a group's shape, by its members and the first of them.
fn shape(
    of_axis: &[Vec<usize>; 2],
    world: usize,
    shard_size: usize,
    members: Members,
    first: Rank,
) -> usize {
    let [shard, replicate] = of_axis;
    match members {
        Members::Shard => shard[first.index() / shard_size],
        Members::Replicate => replicate[first.index() % shard_size],
        Members::World => world,
    }
}

/// A workload on a machine.
pub(crate) struct OnMachine<'a> {
    machine: &'a Machine,
    groups: Arc<MeshGroups>,
    /// Costs by unit.
    forward: Vec<WorkCost>,
    backward: Vec<WorkCost>,
    accumulate: Vec<WorkCost>,
    fold: Vec<WorkCost>,
    loss: WorkCost,
    norm: WorkCost,
    update: WorkCost,
    /// Costs of the update of a slice by unit, if replicas divide state.
    slices: Vec<WorkCost>,
    /// Last cost of each collective, with its bytes and its shape. Units that follow each other are
    /// often alike.
    last: [Cell<Option<(u64, usize, OperationCost)>>; 5],
}

impl<'a> OnMachine<'a> {
    /// Returns the costs of a step of a plan with these sizes.
    ///
    /// # Errors
    /// [`Error::Computation`] as [`Workload::predict`].
    pub(crate) fn of(
        computation: &Computation,
        batch: &Batch,
        sizes: &PlanSizes,
        machine: &'a Machine,
        groups: Arc<MeshGroups>,
    ) -> Result<Self, Error> {
        let processor = Processor::new(machine, batch.dtype, sizes.mesh.world_size())?;
        let units = || sizes.units.iter();
        let pass = |bytes: u64| processor.pass(bytes);
        let word = DType::F32.size_bytes() as u64;
        // Each replica adds up the norm of its slice.
        let replicas = sizes.mesh.replicate_size() as u64;
        let update = sizes.update.cost(sizes.mesh, machine, &processor);
        // A device folds sums whole, beside the elements that the rank updates.
        let folded = |it: &UnitSizes| match machine.device() {
            Some(_) => it.shard,
            None => it.updated,
        };
        Ok(Self {
            machine,
            groups,
            forward: computation.forwards(batch, &processor),
            backward: computation.backwards(batch, &processor),
            accumulate: units().map(|it| pass(it.full * (it.gradient + 2 * word))).collect(),
            fold: units().map(|it| pass(folded(it) * 3 * word)).collect(),
            loss: computation.loss(batch, &processor),
            norm: pass(units().map(|it| it.shard).sum::<u64>().div_ceil(replicas) * word),
            slices: sizes.update.of_slices(update),
            update,
            last: Default::default(),
        })
    }

    /// Returns the cost of an operation that moves tensors in a group of this shape.
    fn moved(&self, collective: CollectiveKind, bytes: u64, shape: usize) -> OperationCost {
        let last = &self.last[collective as usize];
        if let Some((_, _, cost)) = last.get().filter(|it| (it.0, it.1) == (bytes, shape)) {
            return cost;
        }
        let cost = self.moved_among(collective, bytes, &self.groups.shapes[shape]);
        last.set(Some((bytes, shape, cost)));
        cost
    }

    fn moved_among(&self, collective: CollectiveKind, bytes: u64, shape: &Shape) -> OperationCost {
        let cost = collective_cost(self.machine, shape, collective, bytes);
        let issue = Time::saturating(self.machine.calls.issue.value());
        match self.machine.device() {
            Some(_) => OperationCost { host: issue, link: cost.time, busy: cost.busy },
            // The ranks' threads make the passes over memory.
            None => {
                let passes = cost.busy[Level::Machine as usize];
                let link = cost.time.saturating_sub(passes);
                OperationCost { host: issue + passes, link, busy: cost.busy }
            }
        }
    }
}

impl Costs for OnMachine<'_> {
    fn shape(&self, members: Members, first: Rank) -> usize {
        let MeshGroups { of_axis, world, shard_size, .. } = &*self.groups;
        shape(of_axis, *world, *shard_size, members, first)
    }

    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost {
        let placed = &self.groups.shapes[shape];
        let bytes = operation.bytes();
        let all = || bytes.saturating_mul(placed.members() as u64);
        match (operation.channel, operation.op) {
            _ if operation.stage == Stage::GatherSlices => {
                self.moved(CollectiveKind::AllGatherParts, bytes, shape)
            }
            _ if operation.stage == Stage::ScatterSums => {
                self.moved(CollectiveKind::ReduceScatterParts, bytes, shape)
            }
            (Channel::Control | Channel::Statistics, _) => OperationCost {
                host: Time::saturating(self.machine.calls.issue.value()),
                link: exchange_time(self.machine, placed),
                busy: [Time::ZERO; 2],
            },
            (_, Op::AllGather) => self.moved(CollectiveKind::AllGather, all(), shape),
            (_, Op::ReduceScatter) => self.moved(CollectiveKind::ReduceScatter, bytes, shape),
            _ => self.moved(CollectiveKind::AllReduce, bytes, shape),
        }
    }

    fn work(&self, work: Work) -> WorkCost {
        match work {
            Work::Forward(unit) => self.forward[unit.index()],
            Work::Backward(unit) => self.backward[unit.index()],
            Work::Accumulate(unit) => self.accumulate[unit.index()],
            Work::Fold(unit) => self.fold[unit.index()],
            Work::Loss => self.loss,
            Work::Norm => self.norm,
            Work::Update => self.update,
            Work::UpdateSlice(unit) => self.slices[unit.index()],
        }
    }
}

/// Refuses updates of whole matrices: their products and exchanges take most of their time, and are
/// not modelled.
pub(crate) fn check_update(plan: &Plan) -> Result<(), Error> {
    let is_whole = |param: &&Param| matches!(param.state, State::Muon | State::Owned(_));
    match trained(plan).map(|(_, param)| param).find(is_whole) {
        None => Ok(()),
        Some(param) => Err(Error::Computation {
            problem: format!(
                "the time of an update of the whole of `{}` is not modelled, as by Muon",
                param.name
            ),
        }),
    }
}

/// Returns the parameters that are trained, each with the compute dtype of its unit.
fn trained(plan: &Plan) -> impl Iterator<Item = (DType, &Param)> {
    let of_unit = |unit: &UnitId| {
        let dtype = plan.compute_dtype(*unit);
        trained_in(plan, *unit).map(move |param| (dtype, param))
    };
    plan.reductions().iter().flat_map(of_unit)
}

/// Returns the parameters of a unit that are trained.
fn trained_in(plan: &Plan, unit: UnitId) -> impl Iterator<Item = &Param> {
    plan.spec()[unit].params.iter().filter(|param| param.role == Role::Trainable)
}

/// Sizes of a plan on which the costs of its actions depend.
#[derive(Clone, Debug)]
pub(crate) struct PlanSizes {
    pub(super) mesh: Mesh,
    units: Vec<UnitSizes>,
    update: UpdateSizes,
}

/// Trained elements of a unit in a rank's shard, among them those that it updates, and in all; and
/// bytes of an element's gradient.
#[derive(Clone, Copy, Debug)]
struct UnitSizes {
    shard: u64,
    updated: u64,
    full: u64,
    gradient: u64,
}

impl PlanSizes {
    /// Returns the sizes of a plan with a part of the model in the host's memory.
    ///
    /// # Errors
    /// The errors of [`check_update`].
    pub(crate) fn of(plan: &Plan, offload: Offload) -> Result<Self, Error> {
        check_update(plan)?;
        let of_unit = |unit: UnitId| {
            let trained = plan.layout(unit).trainable();
            let gradient = plan.compute_dtype(unit).size_bytes() as u64;
            let shard = trained.shard_len as u64;
            let updated = shard.div_ceil((plan.updaters() / plan.mesh().shard_size()) as u64);
            UnitSizes { shard, updated, full: trained.len as u64, gradient }
        };
        let units = plan.spec().unit_ids().map(of_unit).collect();
        Ok(Self { mesh: plan.mesh(), units, update: UpdateSizes::of(plan, offload) })
    }

    /// Returns the number of units.
    pub(super) const fn units(&self) -> usize {
        self.units.len()
    }
}

/// Bytes of a rank's update. All ranks that divide the update are charged with an even share.
#[derive(Clone, Debug)]
struct UpdateSizes {
    /// Bytes that pass through the memory that holds the optimizer.
    passed: f64,
    /// Bytes that a device moves to the host before, and back after. `None` if it updates itself.
    moved: Option<f64>,
    /// Bytes of all ranks that pass through memory, by unit; empty unless replicas divide state.
    by_unit: Vec<u64>,
}

impl UpdateSizes {
    fn of(plan: &Plan, offload: Offload) -> Self {
        let share = 1.0 / plan.updaters() as f64;
        let sum = |bytes: &dyn Fn(DType, &Param) -> f64| -> f64 {
            let of_param =
                |(copy, param): (DType, &Param)| param.numel() as f64 * bytes(copy, param);
            trained(plan).map(of_param).sum::<f64>() * share
        };
        let word = DType::F32.size_bytes() as f64;
        // Gradients there; with the state alone offloaded parameters there, too, and parameters
        // back.
        let moved = match offload {
            Offload::None => None,
            Offload::All => Some(sum(&|copy, _| word + copy.size_bytes() as f64)),
            _ => Some(sum(&|_, _| 3.0 * word)),
        };
        let passed = sum(&|copy, param| update_bytes(param.state, copy));
        let by_unit = match plan.divides_state() {
            true => plan.spec().unit_ids().map(|unit| passed_by(plan, unit)).collect(),
            false => Vec::new(),
        };
        Self { passed, moved, by_unit }
    }

    /// Returns the parts of an update's cost by unit, in proportion to their bytes. Each is rounded
    /// up, so that together they are no less than the whole, and none grows while it shrinks.
    fn of_slices(&self, update: WorkCost) -> Vec<WorkCost> {
        let all = self.by_unit.iter().sum::<u64>().max(1);
        let part = |time: Time, bytes: u64| {
            let picoseconds = u128::from(time.picoseconds()) * u128::from(bytes);
            let picoseconds = picoseconds.div_ceil(u128::from(all));
            Time::from_picoseconds(u64::try_from(picoseconds).expect("a part of the whole"))
        };
        let of_unit = |bytes: &u64| WorkCost {
            host: part(update.host, *bytes),
            device: part(update.device, *bytes),
        };
        self.by_unit.iter().map(of_unit).collect()
    }

    /// Returns the cost of the update. On a host that updates for its cards, each card has an equal
    /// part of the host's memory bandwidth.
    fn cost(&self, mesh: Mesh, machine: &Machine, processor: &Processor) -> WorkCost {
        let (Some(device), Some(moved)) = (machine.device(), self.moved) else {
            return processor.pass(rounded(self.passed));
        };
        let host = &device.host;
        let copies = moved / (host.bandwidth.value() * host.efficiency.value());
        let sharing = machine.cards().min(mesh.world_size()) as f64;
        let passes = self.passed * sharing / host.memory.value();
        WorkCost { device: Time::saturating(copies + passes), ..processor.pass(0) }
    }
}

/// Returns the bytes of all ranks that pass through memory in the update of a unit.
fn passed_by(plan: &Plan, unit: UnitId) -> u64 {
    let copy = plan.compute_dtype(unit);
    let bytes = |param: &Param| param.numel() as f64 * update_bytes(param.state, copy);
    rounded(trained_in(plan, unit).map(bytes).sum())
}

/// Returns the cost of a rank's update with a part of the model in the host's memory.
pub(crate) fn update_cost(
    plan: &Plan,
    offload: Offload,
    machine: &Machine,
    processor: &Processor,
) -> WorkCost {
    UpdateSizes::of(plan, offload).cost(plan.mesh(), machine, processor)
}

fn rounded(bytes: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    let bytes = bytes as u64;
    bytes
}
