//! The costs of a step's actions on a machine.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use hsdp_flight::{Channel, Op};
use hsdp_sharding::{Axis, DType, Mesh, Offload, Param, Plan, Rank, Role, State, UnitId};

use super::Workload;
use crate::collective::exchange_time;
use crate::computation::update_bytes;
use crate::order::{Members, Operation, Work};
use crate::simulation::{Colors, Costs, OperationCost, WorkCost};
use crate::{Collective, Error, Level, Machine, Processor, Shape, Shapes, Time, collective_cost};

/// The groups of a mesh on a machine, and the colors of its ranks. All workloads on this mesh share
/// them.
#[derive(Debug)]
pub(crate) struct Groups {
    /// Shapes that differ.
    shapes: Vec<Shape>,
    /// The number of a group's shape, by axis, and by index on the other one.
    of_axis: [Vec<usize>; 2],
    world: usize,
    shard_size: usize,
    /// Colors of ranks that all have data.
    pub(crate) colors: Colors,
}

impl Groups {
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
        let (world, shard_size) = (number(placed.world()), mesh.shard_size());
        let of_axis = [shard, replicate];
        let shape = |members, first| shape(&of_axis, world, shard_size, members, first);
        let colors = Colors::of(mesh, &BTreeSet::new(), &shape);
        Ok(Self { shapes, of_axis, world, shard_size, colors })
    }
}

/// The number of a group's shape, by its members and the first of them.
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
    groups: Arc<Groups>,
    /// By unit.
    forward: Vec<WorkCost>,
    backward: Vec<WorkCost>,
    accumulate: Vec<WorkCost>,
    fold: Vec<WorkCost>,
    loss: WorkCost,
    norm: WorkCost,
    update: WorkCost,
}

impl<'a> OnMachine<'a> {
    /// The costs of a workload.
    ///
    /// # Errors
    /// The errors of [`Workload::predict`].
    pub(super) fn new(workload: &Workload, machine: &'a Machine) -> Result<Self, Error> {
        check_update(&workload.plan)?;
        let groups = Groups::new(workload.plan.mesh(), machine)?;
        Self::among(workload, machine, Arc::new(groups))
    }

    /// The costs of a workload on a mesh that is placed.
    ///
    /// # Errors
    /// [`Error::Computation`] as [`Workload::predict`].
    pub(crate) fn among(
        workload: &Workload,
        machine: &'a Machine,
        groups: Arc<Groups>,
    ) -> Result<Self, Error> {
        let Workload { plan, computation, batch, .. } = workload;
        check_update(plan)?;
        let mesh = plan.mesh();
        let processor = Processor::new(machine, batch.dtype, mesh.world_size())?;
        let units = || plan.spec().unit_ids();
        let pass = |bytes: u64| processor.pass(bytes);
        let shard_of = |unit: UnitId| plan.layout(unit).trainable().shard_len as u64;
        let full_of = |unit: UnitId| plan.layout(unit).trainable().len as u64;
        let gradient = |unit: UnitId| plan.compute_dtype(unit).size_bytes() as u64;
        let word = DType::F32.size_bytes() as u64;
        Ok(Self {
            machine,
            groups,
            forward: units().map(|unit| computation.forward(unit, batch, &processor)).collect(),
            backward: units().map(|unit| computation.backward(unit, batch, &processor)).collect(),
            accumulate: units().map(|it| pass(full_of(it) * (gradient(it) + 2 * word))).collect(),
            fold: units().map(|it| pass(shard_of(it) * 3 * word)).collect(),
            loss: computation.loss(batch, &processor),
            norm: pass(units().map(shard_of).sum::<u64>() * word),
            update: update_cost(plan, workload.offload, machine, &processor),
        })
    }

    /// The cost of an operation that moves tensors, of a group of `members` ranks.
    fn moved(&self, collective: Collective, bytes: u64, shape: &Shape) -> OperationCost {
        let cost = collective_cost(self.machine, shape, collective, bytes);
        let issue = time(self.machine.calls.issue.value());
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
        let Groups { of_axis, world, shard_size, .. } = &*self.groups;
        shape(of_axis, *world, *shard_size, members, first)
    }

    fn operation(&self, operation: &Operation, shape: usize) -> OperationCost {
        let shape = &self.groups.shapes[shape];
        let bytes = operation.bytes();
        let all = bytes.saturating_mul(shape.members() as u64);
        match (operation.channel, operation.op) {
            (Channel::Control, _) => OperationCost {
                host: time(self.machine.calls.issue.value()),
                link: exchange_time(self.machine, shape),
                busy: [Time::ZERO; 2],
            },
            (_, Op::AllGather) => self.moved(Collective::AllGather, all, shape),
            (_, Op::ReduceScatter) => self.moved(Collective::ReduceScatter, bytes, shape),
            _ => self.moved(Collective::AllReduce, bytes, shape),
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
        }
    }
}

/// Refuses updates of whole matrices: their products and exchanges take most of their time, and are not modelled.
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

/// The parameters that are trained, each with the compute dtype of its unit.
fn trained(plan: &Plan) -> impl Iterator<Item = (DType, &Param)> {
    let of_unit = |unit: &UnitId| {
        let dtype = plan.compute_dtype(*unit);
        plan.spec()[*unit].params.iter().map(move |param| (dtype, param))
    };
    let params = plan.reductions().iter().flat_map(of_unit);
    params.filter(|(_, param)| param.role == Role::Trainable)
}

/// The update of a rank's shards: bytes through its memory; or of the host's, of which each card has an equal part, with those that go there
/// before and come back after.
pub(crate) fn update_cost(
    plan: &Plan,
    offload: Offload,
    machine: &Machine,
    processor: &Processor,
) -> WorkCost {
    let share = 1.0 / plan.mesh().shard_size() as f64;
    let sum = |bytes: &dyn Fn(DType, &Param) -> f64| -> f64 {
        let of_param = |(copy, param): (DType, &Param)| param.numel() as f64 * bytes(copy, param);
        trained(plan).map(of_param).sum::<f64>() * share
    };
    let passed = sum(&|copy, param| update_bytes(param.state, DType::F32, copy));
    let (Some(device), true) = (machine.device(), offload != Offload::None) else {
        return processor.pass(rounded(passed));
    };
    let word = DType::F32.size_bytes() as f64;
    // Gradients there; with the state alone offloaded parameters there, too, and parameters back.
    let each = |copy: DType| match offload {
        Offload::All => word + copy.size_bytes() as f64,
        _ => 3.0 * word,
    };
    let host = &device.host;
    let copies = sum(&|copy, _| each(copy)) / (host.bandwidth.value() * host.efficiency.value());
    let sharing = machine.cards().min(plan.mesh().world_size()) as f64;
    let passes = passed * sharing / host.memory.value();
    WorkCost { device: time(copies + passes), ..processor.pass(0) }
}

fn rounded(bytes: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    let bytes = bytes as u64;
    bytes
}

fn time(seconds: f64) -> Time {
    Time::from_seconds(seconds).unwrap_or(Time::MAX)
}
