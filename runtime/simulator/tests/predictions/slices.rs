//! Steps whose replicas divide the state of the optimizer.

use std::sync::Arc;

use hsdp_flight::{Channel, Stage};
use hsdp_sharding::step::{Call, DryRun, Kind, Output, Rules, Sequences};
use hsdp_sharding::{
    Accumulation, Axis, ByteCount, DType, ElemCount, Flow, Mesh, ModelSpec, Offload, Param, Plan,
    PlanOptions, Rank, State, StateOver, Traffic, Unit, UnitId, balanced,
};
use hsdp_simulator::{
    Action, Batch, CollectiveKind, Costs, GptShape, Machine, Members, Microbatches, ModelPlacement,
    OperationCost, Order, Prediction, Recompute, Reference, Shapes, Share, StepOperation, Time,
    What, Work, WorkCost, Workload, collective_cost, simulate, trace,
};

/// Units with a batch norm, with frozen parameters, in f32, and kept.
fn spec() -> ModelSpec {
    let unit = |index: usize, len: usize| {
        Unit::new(format!("u{index}")).param(Param::new(format!("w{index}"), [len]))
    };
    ModelSpec::new()
        .unit(unit(0, 900).batch_norm("bn", 3))
        .unit(unit(1, 70).param(Param::new("frozen", [333]).frozen()))
        .unit(Unit::new("all").param(Param::new("table", [40]).frozen()))
        .unit(unit(2, 517).compute_in(DType::F32))
        .unit(unit(3, 1301).keep())
        .updated_by(|_| State::Elements(2))
}

#[derive(Clone, Copy, Debug)]
struct Case {
    mesh: [usize; 2],
    accumulation: Accumulation,
    prefetch: usize,
    state: StateOver,
    microbatches: Microbatches,
    placement: ModelPlacement,
}

impl Case {
    fn plan(&self) -> Arc<Plan> {
        let Self { mesh: [replicas, shards], accumulation, prefetch, state, .. } = *self;
        let options = PlanOptions {
            param_dtype: DType::BF16,
            reduce_dtype: DType::BF16,
            accumulation,
            prefetch,
            state,
            ..PlanOptions::default()
        };
        let mesh = Mesh::new(replicas, shards).expect("a mesh");
        Arc::new(Plan::new(spec(), mesh, options).expect("a plan"))
    }

    fn order(&self, plan: &Arc<Plan>) -> Order {
        Order::of(plan, self.microbatches, self.placement)
    }
}

/// Returns all combinations of some choices.
fn cases() -> impl Iterator<Item = Case> {
    let meshes = (1..=3).flat_map(|replicas| (1..=3).map(move |shards| [replicas, shards]));
    let modes = || StateOver::ALL.map(|state| Accumulation::ALL.map(|it| (state, it)));
    let microbatches = [Microbatches::Given(1), Microbatches::Given(4), Microbatches::Asked(2)];
    let steps = [ModelPlacement::Host, ModelPlacement::Device]
        .map(|placement| microbatches.map(|microbatches| (placement, microbatches)));
    meshes.flat_map(move |mesh| {
        modes().into_iter().flatten().flat_map(move |(state, accumulation)| {
            steps.into_iter().flatten().flat_map(move |(placement, microbatches)| {
                [0, 1, 3].map(|prefetch| Case {
                    mesh,
                    accumulation,
                    prefetch,
                    state,
                    microbatches,
                    placement,
                })
            })
        })
    })
}

/// Returns the operations of a step, as many times as a rank makes them.
fn operations(order: &Order) -> impl Iterator<Item = (&StepOperation, u64)> {
    order.blocks.iter().flat_map(|block| block.operations.iter().map(|it| (it, block.times)))
}

/// Returns the bytes that a rank receives in an operation.
fn received(plan: &Plan, rank: Rank, operation: &StepOperation) -> ByteCount {
    let StepOperation { members, stage, dtype, elements, unit, .. } = *operation;
    let others = members.count(plan.mesh()) as u64 - 1;
    let bytes = |count: usize| ElemCount::of(count).bytes(dtype);
    let sums_of = |own: usize, finished: DType| {
        bytes(own) * others + ElemCount::of(elements - own).bytes(finished)
    };
    let slice = || plan.slice(unit.expect("a unit"), rank).len();
    match stage {
        Stage::Gather => bytes(elements) * others,
        Stage::Reduce => bytes(elements / plan.mesh().shard_size()) * others,
        Stage::AllReduce => {
            let place = plan.mesh().coordinate(rank).on(Axis::Replicate);
            sums_of(balanced(elements, plan.mesh().replicate_size(), place).len(), DType::F32)
        }
        Stage::ScatterSums => bytes(slice()) * others,
        Stage::GatherSlices => bytes(elements - slice()),
        Stage::Statistics => {
            sums_of(balanced(elements, plan.mesh().world_size(), rank.index()).len(), dtype)
        }
        stage => panic!("{stage} is not planned"),
    }
}

/// Returns the calls and the bytes of a rank in a step.
fn simulated(plan: &Plan, rank: Rank, order: &Order) -> Traffic {
    let mut traffic = Traffic::default();
    for (operation, times) in operations(order) {
        let is_alone = operation.members.count(plan.mesh()) == 1;
        if is_alone || operation.channel == Channel::Control {
            continue;
        }
        let flow = match operation.stage {
            Stage::Gather => &mut traffic.all_gather,
            Stage::Reduce => &mut traffic.reduce_scatter,
            Stage::AllReduce => &mut traffic.all_reduce,
            Stage::ScatterSums => &mut traffic.scatter_sums,
            Stage::GatherSlices => &mut traffic.gather_slices,
            Stage::Statistics => &mut traffic.statistics,
            stage => panic!("{stage} is not planned"),
        };
        let bytes = received(plan, rank, operation);
        *flow = *flow + Flow { calls: 1, bytes } * times;
    }
    traffic
}

#[test]
fn bytes_of_a_simulated_step_are_those_of_the_plan() {
    let mut divided = 0;
    for case in cases() {
        let plan = case.plan();
        let order = case.order(&plan);
        divided += usize::from(plan.divides_state());
        for rank in plan.mesh().ranks() {
            let planned = plan.traffic(rank, case.microbatches.count());
            assert_eq!(simulated(&plan, rank, &order), planned, "{case:?}, rank {rank}");
        }
    }
    assert!(divided > 100, "{divided}");
}

/// An operation that members compare, with its channel.
type Listed = (Channel, Members, DType, usize, Option<UnitId>);

fn listed(operation: &StepOperation) -> Listed {
    let StepOperation { channel, members, dtype, elements, unit, .. } = *operation;
    (channel, members, dtype, elements, unit)
}

/// Returns the operations of outputs, but those on the control channel, in order.
fn said<'a>(plan: &'a Plan, outputs: &'a [Output]) -> impl Iterator<Item = Listed> + 'a {
    outputs.iter().filter_map(|output| {
        let Call { kind, members, dtype, elements, unit } = output.call(plan)?;
        let channel = match kind {
            Kind::Gather => Channel::Gather,
            Kind::ReduceScatter => Channel::Reduce,
            Kind::AllReduce | Kind::ScatterSums | Kind::GatherSlices => Channel::AllReduce,
            Kind::Statistics => Channel::Statistics,
            Kind::Exchange(_) => return None,
        };
        Some((channel, members, dtype, elements, unit))
    })
}

/// Returns the operations of each channel, or those of all channels of one sequence.
fn in_sequences(operations: &[Listed], placement: ModelPlacement) -> Vec<Vec<Listed>> {
    let of = |channels: &[Channel]| {
        operations.iter().filter(|it| channels.contains(&it.0)).copied().collect()
    };
    let [gather, reduce, all_reduce] = [Channel::Gather, Channel::Reduce, Channel::AllReduce];
    match placement {
        ModelPlacement::Device => {
            vec![of(&[gather, reduce, all_reduce]), of(&[Channel::Statistics])]
        }
        ModelPlacement::Host => {
            [gather, reduce, all_reduce, Channel::Statistics].map(|it| of(&[it])).to_vec()
        }
    }
}

/// An order has the operations that the machine decides in a step, behind those of the update
/// before.
#[test]
fn the_order_is_that_of_the_machine() {
    for case in cases() {
        let plan = case.plan();
        let Case { placement, microbatches, .. } = case;
        let sequences = match placement {
            ModelPlacement::Host => Sequences::OfEachChannel,
            ModelPlacement::Device => Sequences::One,
        };
        let count = usize::try_from(microbatches.count()).expect("few");
        let given = matches!(microbatches, Microbatches::Given(_)).then_some(count);
        let run = DryRun::of(&plan, Rules { sequences, ..Rules::default() }, given, count);
        let step = [run.update, run.opening, run.microbatches.concat(), run.finish].concat();
        let expected: Vec<Listed> = said(&plan, &step).collect();

        let order = case.order(&plan);
        let repeated = order.blocks.iter().flat_map(|block| {
            std::iter::repeat_n(&block.operations, usize::try_from(block.times).expect("few"))
        });
        let found = repeated.flatten().filter(|it| it.channel != Channel::Control).map(listed);
        let found: Vec<Listed> = found.collect();
        let [found, expected] = [found, expected].map(|all| in_sequences(&all, placement));
        assert_eq!(found, expected, "{case:?}");
    }
}

/// In host memory slices are gathered behind the update of their unit, and the thread waits for
/// them before the unit's first gather. On a device they are gathered just before it.
#[test]
fn first_gathers_follow_the_slices_of_their_units() {
    for case in cases() {
        let plan = case.plan();
        let order = case.order(&plan);
        let mut outlasting = Vec::new();
        let mut whole = Vec::new();
        let mut last = None;
        let mut just_before = None;
        for block in &order.blocks {
            let unit_of = |index: &usize| block.operations[*index].unit.expect("a unit");
            outlasting.extend(block.slices.iter().map(unit_of));
            for action in &block.actions {
                match action {
                    Action::Need(Reference::Slices(place)) => {
                        assert_eq!(block.times, 1, "{case:?}");
                        whole.push(outlasting[*place]);
                    }
                    Action::Settle(Reference::Here(index))
                        if block.operations[*index].stage == Stage::GatherSlices =>
                    {
                        assert_eq!((block.times, last), (1, Some(*index)), "{case:?}");
                        just_before = Some(unit_of(index));
                        whole.extend(just_before);
                    }
                    Action::Issue(index) if block.operations[*index].stage == Stage::Gather => {
                        let unit = unit_of(index);
                        let is_whole = whole.contains(&unit) || !plan.divides_state();
                        let is_frozen = !plan.spec()[unit].is_trainable();
                        assert!(is_whole || is_frozen, "{case:?}");
                        assert!(just_before.take().is_none_or(|it| it == unit), "{case:?}");
                    }
                    _ => {}
                }
                if let Action::Issue(index) = action {
                    last = Some(*index);
                }
            }
        }
        let expected: Vec<UnitId> = match plan.divides_state() {
            true => plan.update_order().collect(),
            false => Vec::new(),
        };
        assert_eq!(whole, expected, "{case:?}");
        let outlasts = case.placement == ModelPlacement::Host;
        assert_eq!(outlasting.len(), if outlasts { expected.len() } else { 0 }, "{case:?}");
    }
}

const GPT: GptShape = GptShape { width: 256, heads: 8, layers: 16, context: 512, vocabulary: 1000 };

fn workload(mesh: [usize; 2], state: StateOver, microbatches: u64, offload: Offload) -> Workload {
    let dtype = DType::BF16;
    let options =
        PlanOptions { param_dtype: dtype, reduce_dtype: dtype, state, ..PlanOptions::default() };
    let mesh = Mesh::new(mesh[0], mesh[1]).expect("a mesh");
    let spec = GPT.spec().updated_by(|_| State::Elements(2));
    Workload {
        plan: Arc::new(Plan::new(spec, mesh, options).expect("a plan")),
        computation: Arc::new(GPT.computation().expect("a GPT")),
        batch: Batch { sequences: 8, context: 512, dtype, recompute: Recompute::Nothing },
        microbatches: Microbatches::Given(microbatches),
        offload,
    }
}

fn machine(name: &str) -> Machine {
    Machine::bundled(name).expect("bundled")
}

/// Returns the offloads that are possible on a machine.
fn offloads(machine: &Machine) -> &'static [Offload] {
    if machine.device().is_some() { &Offload::EVERY } else { &[Offload::None] }
}

#[test]
fn one_replica_divides_nothing() {
    for machine in ["a100-cluster", "two-core-cpu"].map(machine) {
        for (shards, offload) in
            [1, 2, 12].into_iter().flat_map(|it| offloads(&machine).iter().map(move |o| (it, *o)))
        {
            let [shards, world] = StateOver::ALL.map(|state| {
                workload([1, shards], state, 3, offload).predict(&machine).expect("a prediction")
            });
            assert_eq!(shards, world);
        }
    }
}

#[test]
fn memory_is_that_of_the_plan() {
    for machine in ["a100-cluster", "two-core-cpu"].map(machine) {
        for offload in offloads(&machine) {
            let [shards, world] = StateOver::ALL.map(|state| {
                let workload = workload([4, 2], state, 1, *offload);
                let memory = workload.predict(&machine).expect("a prediction").memory;
                let plan = &workload.plan;
                let planned = match machine.device() {
                    Some(_) => [plan.memory_on_device(*offload), plan.memory_offloaded(*offload)],
                    None => [plan.memory(), Default::default()],
                };
                assert_eq!([memory.planned, memory.offloaded], planned);
                memory.planned.optimizer + memory.offloaded.optimizer
            });
            // Slices differ in length by some elements for each unit.
            let ratio = shards.get() as f64 / world.get() as f64;
            assert!((3.9..=4.0).contains(&ratio), "{offload}: {ratio}");
        }
    }
}

/// A rank updates as much as if all ranks were one shard group.
#[test]
fn a_rank_updates_its_slices_alone() {
    for mut machine in ["a100-cluster", "two-core-cpu"].map(machine) {
        for name in ["compute.launch", "compute.kernel"] {
            machine.set(name, 1e-12, "a test").expect("possible");
        }
        for offload in offloads(&machine) {
            let seconds = |mesh, state| {
                let prediction: Prediction =
                    workload(mesh, state, 1, *offload).predict(&machine).expect("a prediction");
                prediction.timing.ranks[0].shares.of(Share::Optimizer).seconds()
            };
            let world = seconds([4, 2], StateOver::World);
            let one_group = seconds([1, 8], StateOver::Shards);
            assert!((world / one_group - 1.0).abs() < 1e-3, "{offload}: {world}, {one_group}");
            let whole = seconds([4, 2], StateOver::Shards);
            assert!(whole > 3.0 * world, "{offload}: {whole}, {world}");
        }
    }
}

/// A device folds the sums of a microbatch whole. A host folds those that its rank updates.
#[test]
fn a_device_folds_the_elements_of_all_slices() {
    for (name, parts) in [("a100-cluster", 1.0), ("two-core-cpu", 4.0)] {
        let mut machine = machine(name);
        for name in ["compute.launch", "compute.kernel"] {
            machine.set(name, 1e-12, "a test").expect("possible");
        }
        let [shards, world] = StateOver::ALL.map(|state| {
            let workload = workload([4, 2], state, 1, Offload::None);
            let costs = workload.costs(&machine).expect("costs");
            let WorkCost { host, device } = costs.work(Work::Fold(UnitId::new(1)));
            host.seconds() + device.seconds()
        });
        assert!((shards / world / parts - 1.0).abs() < 1e-3, "{name}: {shards}, {world}");
    }
}

/// Cards copy slices to padded buffers and back, for NCCL.
#[test]
fn slices_move_as_parts_do() {
    for machine in ["a100-cluster", "two-core-cpu"].map(machine) {
        let workload = workload([4, 2], StateOver::World, 1, Offload::None);
        let shapes = Shapes::new(workload.plan.mesh(), &machine).expect("it fits");
        let replicas = shapes.group(Axis::Replicate, Rank::new(0));
        let costs = workload.costs(&machine).expect("costs");
        let order = workload.order(&machine);
        let mut compared = [0; 2];
        for (operation, _) in operations(&order) {
            let (index, kind) = match operation.stage {
                Stage::ScatterSums => (0, CollectiveKind::ReduceScatterParts),
                Stage::GatherSlices => (1, CollectiveKind::AllGatherParts),
                _ => continue,
            };
            let bytes = (operation.elements * operation.dtype.size_bytes()) as u64;
            let shape = costs.shape(operation.members, Rank::new(0));
            let found = costs.operation(operation, shape);
            let expected = collective_cost(&machine, &replicas, kind, bytes);
            assert_eq!(found.busy, expected.busy, "{operation:?}");
            if machine.device().is_some() {
                assert_eq!(found.link, expected.time, "{operation:?}");
            }
            compared[index] += 1;
        }
        assert!(compared.iter().all(|count| *count > 16), "{compared:?}");
    }
}

/// The costs of a step whose slices are gathered over slow links, beside other costs.
struct SlowSlices<C> {
    costs: C,
    replicas: f64,
    bytes_per_second: f64,
}

impl<C> SlowSlices<C> {
    /// Returns the time that the links add to an operation.
    fn of(&self, operation: &StepOperation) -> Time {
        if operation.stage != Stage::GatherSlices {
            return Time::ZERO;
        }
        let bytes = operation.elements as f64 * operation.dtype.size_bytes() as f64;
        let received = bytes * (self.replicas - 1.0) / self.replicas;
        Time::from_seconds(received / self.bytes_per_second).expect("a time")
    }
}

impl<C: Costs> Costs for SlowSlices<C> {
    fn shape(&self, members: Members, first: Rank) -> usize {
        self.costs.shape(members, first)
    }

    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost {
        let cost = self.costs.operation(operation, shape);
        OperationCost { link: cost.link + self.of(operation), ..cost }
    }

    fn work(&self, work: Work) -> WorkCost {
        self.costs.work(work)
    }
}

/// Returns the part of the time of all gathers of slices for which a rank's thread waits, and that
/// time as a part of the step, with links between replicas of this speed.
fn exposed(bytes_per_second: f64) -> [f64; 2] {
    let machine = machine("two-core-cpu");
    let workload = workload([2, 1], StateOver::World, 1, Offload::None);
    let costs = workload.costs(&machine).expect("costs");
    let costs = SlowSlices { costs, replicas: 2.0, bytes_per_second };
    let (timing, spans) = trace(&workload.order(&machine), &costs).expect("it ends");
    let seconds = |is: &dyn Fn(What) -> bool| -> f64 {
        let of = spans.iter().filter(|span| span.color == 0 && is(span.what));
        of.map(|span| span.ends.saturating_sub(span.begins).seconds()).sum()
    };
    let is_slices = |it: StepOperation| it.stage == Stage::GatherSlices;
    let all = seconds(&|what| matches!(what, What::Operation(it) if is_slices(it)));
    let waited = seconds(&|what| matches!(what, What::Wait(it) if is_slices(it)));
    [waited / all, all / timing.step.seconds()]
}

/// Slices are gathered while the forward computes: at least four fifths of the time are hidden if
/// the gathers of all units take no longer than their forward.
#[test]
fn gathers_of_slices_hide_behind_the_forward() {
    // All gathers take 4 % to 14 % of a step, and the forward takes a third of it.
    for bytes_per_second in [2e7, 4e7, 8e7] {
        let [exposed, of_step] = exposed(bytes_per_second);
        println!("{bytes_per_second:e} B/s: {exposed:.3} of {of_step:.3}");
        assert!((0.02..0.3).contains(&of_step), "{bytes_per_second:e} B/s: {of_step}");
        assert!(exposed <= 0.2, "{bytes_per_second:e} B/s: {exposed}");
    }
    // No forward hides gathers that take longer than all computation.
    let [exposed, of_step] = exposed(5e5);
    assert!(of_step > 0.4 && exposed > 0.5, "{of_step}, {exposed}");
}

/// On a device, too, though all operations are one sequence: each gather of slices is issued with
/// the gather of its unit, which is issued ahead.
#[test]
fn gathers_of_slices_hide_behind_the_forward_of_a_device() {
    let machine = machine("a100-cluster");
    let workload = workload([2, 8], StateOver::World, 1, Offload::None);
    let order = workload.order(&machine);
    let run = |bytes_per_second| {
        let costs = workload.costs(&machine).expect("costs");
        let costs = SlowSlices { costs, replicas: 2.0, bytes_per_second };
        let operations = order.blocks.iter().flat_map(|block| &block.operations);
        let added = operations.map(|it| costs.of(it)).fold(Time::ZERO, |sum, it| sum + it);
        [simulate(&order, &costs).expect("it ends").step, added].map(Time::seconds)
    };
    let [fast, _] = run(f64::INFINITY);
    for bytes_per_second in [2e8, 4e8, 6e8] {
        let [slow, added] = run(bytes_per_second);
        let [exposed, of_step] = [(slow - fast) / added, added / slow];
        println!("{bytes_per_second:e} B/s: {exposed:.3} of {of_step:.3}");
        assert!((0.02..0.3).contains(&of_step), "{bytes_per_second:e} B/s: {of_step}");
        assert!(exposed <= 0.2, "{bytes_per_second:e} B/s: {exposed}");
    }
}

/// A statement leaves nothing under way, so two steps in a row take twice as long as one.
#[test]
fn a_step_repeats() {
    for name in ["two-core-cpu", "a100-cluster"] {
        let machine = machine(name);
        for (mesh, microbatches) in [[2, 2], [3, 5], [4, 1]].map(|it| [(it, 1), (it, 4)]).concat() {
            let workload = workload(mesh, StateOver::World, microbatches, Offload::None);
            let costs = workload.costs(&machine).expect("costs");
            let order = workload.order(&machine);
            let once = simulate(&order, &costs).expect("it ends").step;
            let blocks = [&order.blocks[..]; 2].concat();
            let twice = simulate(&Order { blocks, ..order }, &costs).expect("it ends").step;
            assert_eq!(twice, once * 2, "{name}, {mesh:?}, {microbatches} microbatches");
        }
    }
}
