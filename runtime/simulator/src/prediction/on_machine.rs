//! The costs of a step's actions on a machine.

use hsdp_flight::{Channel, Op};
use hsdp_sharding::{Axis, DType, Offload, Param, Plan, Rank, Role, State, UnitId};

use super::Workload;
use crate::collective::exchange_time;
use crate::computation::update_bytes;
use crate::order::{Members, Operation, Work};
use crate::simulation::{Costs, OperationCost, WorkCost};
use crate::{Collective, Error, Level, Machine, Processor, Shape, Shapes, Time, collective_cost};

/// A workload on a machine.
pub(super) struct OnMachine<'a> {
    machine: &'a Machine,
    shapes: Vec<Shape>,
    /// By axis, and by index on the other one.
    groups: [Vec<usize>; 2],
    world: usize,
    shard_size: usize,
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
    pub(super) fn new(workload: &Workload, machine: &'a Machine) -> Result<Self, Error> {
        let Workload { plan, computation, batch, .. } = workload;
        check_update(plan)?;
        let mesh = plan.mesh();
        let processor = Processor::new(machine, batch.dtype, mesh.world_size())?;
        let placed = Shapes::new(mesh, machine)?;
        let mut shapes = Vec::new();
        let mut number = |shape: Shape| {
            shapes.iter().position(|it| *it == shape).unwrap_or_else(|| {
                shapes.push(shape);
                shapes.len() - 1
            })
        };
        let firsts = |count: usize, step: usize| (0..count).map(move |it| Rank::new(it * step));
        let shard = firsts(mesh.replicate_size(), mesh.shard_size());
        let shard = shard.map(|rank| number(placed.group(Axis::Shard, rank))).collect();
        let replicate = firsts(mesh.shard_size(), 1);
        let replicate = replicate.map(|rank| number(placed.group(Axis::Replicate, rank))).collect();
        let world = number(placed.world());
        let units = || plan.spec().unit_ids();
        let pass = |bytes: u64| processor.pass(bytes);
        let shard_of = |unit: UnitId| plan.layout(unit).trainable().shard_len as u64;
        let full_of = |unit: UnitId| plan.layout(unit).trainable().len as u64;
        let gradient = |unit: UnitId| plan.compute_dtype(unit).size_bytes() as u64;
        let word = DType::F32.size_bytes() as u64;
        Ok(Self {
            machine,
            shapes,
            groups: [shard, replicate],
            world,
            shard_size: mesh.shard_size(),
            forward: units().map(|unit| computation.forward(unit, batch, &processor)).collect(),
            backward: units().map(|unit| computation.backward(unit, batch, &processor)).collect(),
            accumulate: units().map(|it| pass(full_of(it) * (gradient(it) + 2 * word))).collect(),
            fold: units().map(|it| pass(shard_of(it) * 3 * word)).collect(),
            loss: computation.loss(batch, &processor),
            norm: pass(units().map(shard_of).sum::<u64>() * word),
            update: update(workload, machine, &processor),
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
        let [shard, replicate] = &self.groups;
        match members {
            Members::Shard => shard[first.index() / self.shard_size],
            Members::Replicate => replicate[first.index() % self.shard_size],
            Members::World => self.world,
        }
    }

    fn operation(&self, operation: &Operation, shape: usize) -> OperationCost {
        let shape = &self.shapes[shape];
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
fn check_update(plan: &Plan) -> Result<(), Error> {
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
fn update(workload: &Workload, machine: &Machine, processor: &Processor) -> WorkCost {
    let Workload { plan, offload, .. } = workload;
    let share = 1.0 / plan.mesh().shard_size() as f64;
    let sum = |bytes: &dyn Fn(DType, &Param) -> f64| -> f64 {
        let of_param = |(copy, param): (DType, &Param)| param.numel() as f64 * bytes(copy, param);
        trained(plan).map(of_param).sum::<f64>() * share
    };
    let passed = sum(&|copy, param| update_bytes(param.state, DType::F32, copy));
    let (Some(device), true) = (machine.device(), *offload != Offload::None) else {
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
