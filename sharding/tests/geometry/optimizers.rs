//! The states of optimizers and the owners of matrices, against counts that go element by element.

use std::collections::HashMap;

use hsdp_sharding::{
    ByteCount, Coordinate, Error, Flow, Mesh, ModelSpec, Offload, Owners, Param, ParamId, Plan,
    PlanOptions, Rank, Role, State, StateOver, Unit, UpdatePlan, WholeMatrix, Wholes,
};
use proptest::prelude::*;

use crate::generators::{cases, mesh, model, state_over, unit_with_rows};
use crate::{slices, sums};

/// A state that a parameter can have; `number` is one of its numbers.
fn state(kind: usize, number: usize, param: &Param) -> State {
    match kind % 5 {
        0 => State::Elements(number % 4),
        1 => State::EightBit { block: number },
        2 => State::Factored,
        3 if param.as_matrices().is_some() => State::Muon,
        _ => State::Owned(number),
    }
}

/// The same model, in which all parameters have states, and some of them declare matrices.
fn updated(spec: &ModelSpec, numbers: &[(usize, usize)]) -> ModelSpec {
    let mut numbers = numbers.iter().copied().cycle();
    let mut unit = |unit: &Unit| {
        let mut unit = unit.clone();
        for param in unit.params.iter_mut().filter(|param| param.role == Role::Trainable) {
            let (kind, number) = numbers.next().expect("some numbers");
            if let (true, [count, rest @ ..]) = (number % 2 == 0, &param.shape[..]) {
                let rest: usize = rest.iter().product();
                *param = param.clone().matrices(*count, 1, rest);
            }
            param.state = state(kind, number, param);
        }
        unit
    };
    let units: Vec<Unit> = spec.units().iter().map(&mut unit).collect();
    units.into_iter().fold(ModelSpec::new(), ModelSpec::unit)
}

fn generated() -> impl Strategy<Value = Plan> {
    let with_rows = unit_with_rows().prop_map(|unit| ModelSpec::new().unit(unit));
    let spec = prop_oneof![2 => model(), 1 => with_rows];
    let numbers = prop::collection::vec((0usize..=4, 1usize..=300), 1..=9);
    (spec, mesh(), numbers, state_over()).prop_map(|(spec, mesh, numbers, state)| {
        let options = PlanOptions { state, ..PlanOptions::default() };
        Plan::new(updated(&spec, &numbers), mesh, options).expect("a valid model")
    })
}

/// Returns the number of ranks that update each element once.
fn updaters(plan: &Plan) -> usize {
    if slices::divided(plan) { plan.mesh().world_size() } else { plan.mesh().shard_size() }
}

/// Returns the rank whose slice has each element of a parameter.
fn slicers(plan: &Plan, id: ParamId) -> Vec<usize> {
    let mesh = plan.mesh();
    let cuts: Vec<Vec<usize>> =
        (0..mesh.shard_size()).map(|shard| slices::cuts(plan, id.unit, shard)).collect();
    let numel = plan.spec()[id].numel();
    let slicer = |element| {
        let (shard_index, index) = place(plan, id, element);
        let replicate_index = cuts[shard_index].partition_point(|cut| *cut <= index) - 1;
        mesh.rank_at(Coordinate { replicate_index, shard_index }).index()
    };
    (0..numel).map(slicer).collect()
}

/// Returns the updater of each element of a parameter.
fn updaters_of(plan: &Plan, id: ParamId) -> Vec<usize> {
    let shards = plan.mesh().shard_size();
    let updater = |rank| if slices::divided(plan) { rank } else { rank % shards };
    slicers(plan, id).into_iter().map(updater).collect()
}

/// The shard that holds an element, and its index in the shard.
fn place(plan: &Plan, id: ParamId, element: usize) -> (usize, usize) {
    let layout = plan.layout(id.unit);
    let in_full = layout.params()[id.index].start + element;
    let shard_len = layout.trainable().len / layout.shard_size();
    (in_full / shard_len, in_full % shard_len)
}

pub(crate) fn trainable(plan: &Plan) -> Vec<(ParamId, Param)> {
    let params = plan.spec().params().map(|(id, param)| (id, param.clone()));
    params.filter(|(_, param)| param.role == Role::Trainable).collect()
}

/// The multiplications of the three products of a Newton-Schulz step on a matrix X of m x n, m <=
/// n: X Xᵀ, its square, and the polynomial of it times X.
fn cost(rows: usize, columns: usize) -> usize {
    let m = rows.min(columns);
    let n = rows.max(columns);
    m * n * m + m * m * m + m * m * n
}

/// The longest first, each to the member with the least so far, as a list that is searched every
/// time.
fn dealt(costs: &[usize], members: usize) -> Vec<usize> {
    let mut sums = vec![0; members];
    let mut owners = vec![usize::MAX; costs.len()];
    for _ in 0..costs.len() {
        let open = (0..costs.len()).filter(|&it| owners[it] == usize::MAX);
        let longest = open.rev().max_by_key(|&it| costs[it]).expect("one is open");
        let least = (0..members).min_by_key(|&member| sums[member]).expect("a member");
        owners[longest] = least;
        sums[least] += costs[longest];
    }
    owners
}

/// A matrix that an owner updates: its parameter, the first element, rows and columns.
type Whole = (ParamId, usize, usize, usize);

/// The matrices of the parameters of Muon.
fn matrices(plan: &Plan) -> Vec<Whole> {
    let muon = trainable(plan).into_iter().filter(|(_, param)| param.state == State::Muon);
    let of_param = |(id, param): (ParamId, Param)| {
        let (count, rows, columns) = match (param.view, &param.shape[..]) {
            (Some(view), _) => (view.count, view.rows, view.columns),
            (None, [rows, columns]) => (1, *rows, *columns),
            (None, shape) => panic!("{shape:?} has no matrices"),
        };
        (0..count).map(move |index| (id, index * rows * columns, rows, columns))
    };
    muon.flat_map(of_param).collect()
}

/// The parameters that are owned whole.
fn parameters(plan: &Plan) -> Vec<Whole> {
    let owned = |param: &Param| matches!(param.state, State::Owned(_));
    let of_param = |(id, param): (ParamId, Param)| match (param.view, &param.shape[..]) {
        (Some(view), _) => (id, 0, view.count * view.rows, view.columns),
        (None, [rows, columns]) => (id, 0, *rows, *columns),
        (None, shape) => (id, 0, 1, shape.iter().product()),
    };
    trainable(plan).into_iter().filter(|(_, param)| owned(param)).map(of_param).collect()
}

fn owners_of(plan: &Plan, wholes: &[Whole]) -> Vec<usize> {
    let costs: Vec<usize> = wholes.iter().map(|&(.., rows, columns)| cost(rows, columns)).collect();
    dealt(&costs, updaters(plan))
}

/// The elements of a parameter that each updater has, and the first elements among them of blocks
/// that are counted from the start of a shard's piece.
fn held(plan: &Plan, id: ParamId, block: usize) -> Vec<(usize, usize)> {
    let mut held = vec![(0, 0); updaters(plan)];
    let mut in_piece = 0;
    let mut last = None;
    for (element, updater) in updaters_of(plan, id).into_iter().enumerate() {
        let (shard, _) = place(plan, id, element);
        in_piece = if last == Some(shard) { in_piece + 1 } else { 0 };
        last = Some(shard);
        held[updater].0 += 1;
        held[updater].1 += usize::from(in_piece % block == 0);
    }
    held
}

/// The f32 of the rows and columns of a parameter of two dims or more, counted one by one.
pub(crate) fn factors(shape: &[usize]) -> usize {
    let matrix = &shape[shape.len() - 2..];
    let stack = &shape[..shape.len() - 2];
    let stacked: usize = stack.iter().product();
    (0..stacked).map(|_| matrix[0] + matrix[1]).sum()
}

/// The bytes of optimizer state by updater.
fn state_by_updater(plan: &Plan) -> Vec<usize> {
    let mut bytes = vec![0; updaters(plan)];
    for (id, param) in trainable(plan) {
        let block = if let State::EightBit { block } = param.state { block } else { 1 };
        for (bytes, (len, blocks)) in bytes.iter_mut().zip(held(plan, id, block)) {
            let padded = (0..len).step_by(32).count() * 32;
            *bytes += match param.state {
                State::Elements(slots) => 4 * slots * padded,
                State::EightBit { .. } => 2 * padded + 8 * blocks,
                State::Factored if param.shape.len() > 1 => 4 * factors(&param.shape),
                State::Factored | State::Muon => 4 * padded,
                State::Owned(_) => 0,
            };
        }
    }
    let wholes = parameters(plan);
    for ((id, ..), owner) in wholes.iter().zip(owners_of(plan, &wholes)) {
        let State::Owned(words) = plan.spec()[*id].state else { panic!("it is owned") };
        bytes[owner] += 4 * words;
    }
    bytes
}

/// The exchange of each updater for some wholes: bytes received, extra memory, that beside and on a
/// device, and the results.
fn exchange(plan: &Plan, wholes: &[Whole], copies: usize) -> Vec<[usize; 5]> {
    let all = updaters(plan);
    let [mut sent, mut received, mut foreign, mut workspace, mut words, mut largest, mut square] =
        [(); 7].map(|()| vec![0; all]);
    let mut of_shape = HashMap::new();
    for (&(id, start, rows, columns), owner) in wholes.iter().zip(owners_of(plan, wholes)) {
        for holder in updaters_of(plan, id).into_iter().skip(start).take(rows * columns) {
            sent[holder] += copies;
            received[owner] += copies;
            if holder != owner {
                foreign[owner] += copies;
                foreign[holder] += 1;
            }
        }
        // The matrix, its square, and a square, or 256 columns if it has these and they are more.
        let small = rows.min(columns);
        let large = rows.max(columns);
        let product = if large < 256 { small.max(large) } else { small.max(256) };
        let needed = match copies {
            1 => rows * columns + small * small + small * product,
            _ => 2 * rows * columns,
        };
        if let State::Owned(state) = plan.spec()[id].state {
            words[owner] += state;
        }
        // Matrices of one shape are computed together; these are far from the limit.
        let together: &mut usize = of_shape.entry((owner, rows, columns)).or_default();
        *together = if copies == 1 { *together + 1 } else { 1 };
        workspace[owner] = (*together * needed).max(workspace[owner]);
        largest[owner] = largest[owner].max(*together * rows * columns);
        square[owner] = square[owner].max(*together * small * small);
    }
    let of = |it: usize| {
        let extra = received[it] + words[it] + sent[it].max(workspace[it]);
        // The parts that are sent, the matrices, and in the iterations A, B and the next X.
        let on_device = sent[it] + largest[it] + 2 * square[it] + largest[it];
        let beside = received[it] + sent[it].max(largest[it]);
        let staged = sent[it] / copies + words[it];
        [foreign[it], extra, beside, on_device, staged].map(|elements| 4 * elements)
    };
    (0..all).map(of).collect()
}

/// The update of each rank.
fn updates(plan: &Plan) -> Vec<UpdatePlan> {
    let wholes = [(matrices(plan), 1), (parameters(plan), 2)];
    let both: Vec<_> = wholes.iter().map(|(wholes, how)| exchange(plan, wholes, *how)).collect();
    let used = wholes.iter().filter(|(wholes, _)| !wholes.is_empty()).count();
    let all = updaters(plan);
    let summed = sums::counted(plan);
    let of = |(rank, summed): (usize, Flow)| {
        let updater = rank % all;
        let bytes = both.iter().map(|it| it[updater][0]).sum();
        let calls = if all > 1 { 2 * used as u64 } else { 0 };
        let [muon, owned] = [&both[0][updater], &both[1][updater]];
        let (sums, factors) = sums::memory(plan);
        let of_each =
            [muon[1] + owned[4] + factors, owned[1] + muon[4] + factors, sums + muon[4] + owned[4]];
        let extra = ByteCount::of(of_each.into_iter().max().expect("three"));
        let exchanged = Flow { calls, bytes: ByteCount::of(bytes) };
        // Only Muon updates matrices on a device.
        let extra_with_device = [muon[2], muon[3]].map(ByteCount::of);
        UpdatePlan { exchanged, summed, extra, extra_with_device }
    };
    summed.into_iter().enumerate().map(of).collect()
}

/// The bytes that each rank writes of trainable parameters and their state.
fn written(plan: &Plan) -> Vec<usize> {
    let mut bytes = vec![0; plan.mesh().world_size()];
    for (id, param) in trainable(plan) {
        let slicers = slicers(plan, id);
        let mut in_piece = 0;
        let mut last = usize::MAX;
        for (element, rank) in slicers.iter().enumerate() {
            let (shard, _) = place(plan, id, element);
            (in_piece, last) = (if shard == last { in_piece + 1 } else { 0 }, shard);
            bytes[*rank] += 4 + match param.state {
                State::Elements(slots) => 4 * slots,
                State::EightBit { block } => 8 + if in_piece % block == 0 { 8 } else { 0 },
                State::Muon => 4,
                State::Factored if param.shape.len() < 2 => 4,
                State::Factored | State::Owned(_) => 0,
            };
        }
        if param.state == State::Factored && param.shape.len() > 1 {
            bytes[slicers[0]] += 4 * factors(&param.shape);
        }
    }
    let wholes = parameters(plan);
    for ((id, ..), owner) in wholes.iter().zip(owners_of(plan, &wholes)) {
        let State::Owned(words) = plan.spec()[*id].state else { panic!("it is owned") };
        // Without slices the owner is a shard, and ranks of the first replica have its numbers.
        bytes[owner] += 4 * words;
    }
    bytes
}

proptest! {
    #![proptest_config(cases(192))]

    #[test]
    fn state_is_what_is_counted(plan in generated()) {
        let counted = state_by_updater(&plan);
        prop_assert_eq!(plan.updaters(), counted.len());
        for rank in plan.mesh().ranks() {
            let updater = rank.index() % counted.len();
            prop_assert_eq!(plan.updater(rank), updater);
            prop_assert_eq!(plan.optimizer_state(rank), ByteCount::of(counted[updater]));
        }
        let most = counted.into_iter().max().unwrap();
        prop_assert_eq!(plan.memory().optimizer, ByteCount::of(most));
    }

    #[test]
    fn an_update_exchanges_what_is_counted(plan in generated()) {
        let counted = updates(&plan);
        for rank in plan.mesh().ranks() {
            let expected = counted[rank.index()];
            prop_assert_eq!(plan.update(rank), expected);
            prop_assert_eq!(plan.traffic(rank, 3).update, expected.flow());
            prop_assert_eq!(plan.traffic(rank, 0).update, Flow::NONE);
        }
        let most = |of: fn(&UpdatePlan) -> ByteCount| counted.iter().map(of).max().unwrap();
        prop_assert_eq!(plan.memory().update, most(|update| update.extra));
        let with_device =
            [plan.memory_offloaded(Offload::None), plan.memory_on_device(Offload::None)];
        prop_assert_eq!(with_device[0].update, most(|update| update.extra_with_device[0]));
        prop_assert_eq!(with_device[1].update, most(|update| update.extra_with_device[1]));
    }

    #[test]
    fn a_snapshot_has_what_is_written(plan in generated()) {
        let written = written(&plan);
        for rank in plan.mesh().ranks() {
            let frozen = plan.pieces_saved_by(rank).into_iter().filter(|(unit, piece)| {
                plan.spec()[*unit].params[piece.param].role == Role::Frozen
            });
            let frozen: usize = frozen.map(|(_, piece)| 4 * piece.len).sum();
            prop_assert_eq!(plan.snapshot(rank), ByteCount::of(written[rank.index()] + frozen));
        }
    }

    /// All elements of all matrices arrive at their owners, each once, from the rank that updates
    /// it.
    #[test]
    fn every_element_is_sent_to_its_owner_once(plan in generated()) {
        let is_muon = |id: ParamId| plan.spec()[id].state == State::Muon;
        let is_owned = |id: ParamId| matches!(plan.spec()[id].state, State::Owned(_));
        let muon = Owners::of(&plan, Wholes::Matrices, is_muon).unwrap();
        let owned = Owners::of(&plan, Wholes::Parameters, is_owned).unwrap();
        assert_all_arrive(&plan, &muon, &matrices(&plan));
        assert_all_arrive(&plan, &owned, &parameters(&plan));
        prop_assert_eq!(&muon, &Owners::of(&plan.clone(), Wholes::Matrices, is_muon).unwrap());
    }
}

fn assert_all_arrive(plan: &Plan, owners: &Owners, expected: &[Whole]) {
    let whole = |it: &WholeMatrix| (it.param, it.start, it.rows, it.columns);
    assert_eq!(owners.matrices().iter().map(whole).collect::<Vec<_>>(), expected);
    let own: Vec<usize> = (0..expected.len()).map(|index| owners.owner(index)).collect();
    assert_eq!(own, owners_of(plan, expected));
    let mut arrived: Vec<Vec<u8>> = expected.iter().map(|it| vec![0; it.2 * it.3]).collect();
    let holders: HashMap<ParamId, Vec<usize>> =
        expected.iter().map(|it| (it.0, updaters_of(plan, it.0))).collect();
    for updater in 0..updaters(plan) {
        let sent = owners.sent_by(plan, updater);
        assert_eq!(sent.len(), updaters(plan));
        for (owner, parts) in sent.into_iter().enumerate() {
            assert!(parts.is_sorted_by(|one, next| one.matrix < next.matrix), "{parts:?}");
            for part in parts {
                assert_eq!(own[part.matrix], owner);
                let (id, start, ..) = expected[part.matrix];
                assert_eq!(id.unit, part.unit);
                for (offset, index) in part.shard.enumerate() {
                    let in_matrix = part.start + offset;
                    assert_eq!(holders[&id][start + in_matrix], updater);
                    let (shard, in_shard) = place(plan, id, start + in_matrix);
                    assert_eq!((shard, in_shard), (updater % plan.mesh().shard_size(), index));
                    arrived[part.matrix][in_matrix] += 1;
                }
            }
        }
    }
    assert!(arrived.iter().flatten().all(|times| *times == 1));
}

/// The least possible maximum of the sums of `members`, by trying all ways to deal out the costs.
fn optimum(costs: &[usize], sums: &mut Vec<usize>) -> usize {
    let Some((cost, rest)) = costs.split_first() else {
        return sums.iter().copied().max().unwrap_or(0);
    };
    let mut best = usize::MAX;
    for member in 0..sums.len() {
        sums[member] += cost;
        best = best.min(optimum(rest, sums));
        sums[member] -= cost;
    }
    best
}

proptest! {
    #![proptest_config(cases(128))]

    /// The bound of Graham (1969), theorem 3: 4/3 - 1/(3 S) of the optimum.
    #[test]
    fn no_owner_has_much_more_than_the_best_dealing_gives_it(
        shapes in prop::collection::vec((1usize..=12, 1usize..=12), 1..=8),
        shards in 1usize..=3,
    ) {
        let params = shapes.iter().enumerate();
        let params = params.map(|(index, &(rows, columns))| Param::new(format!("{index}"), [rows, columns]));
        let spec = ModelSpec::new().unit(params.fold(Unit::new("u"), Unit::param));
        let plan = Plan::new(spec, Mesh::new(1, shards).unwrap(), PlanOptions::default()).unwrap();
        let owners = Owners::of(&plan, Wholes::Matrices, |_| true).unwrap();
        let costs: Vec<usize> = shapes.iter().map(|&(rows, columns)| cost(rows, columns)).collect();
        let mut sums = vec![0; shards];
        costs.iter().enumerate().for_each(|(it, cost)| sums[owners.owner(it)] += cost);
        let most = sums.into_iter().max().unwrap();
        let best = optimum(&costs, &mut vec![0; shards]);
        prop_assert!(best <= most && 3 * shards * most <= (4 * shards - 1) * best);
    }
}

fn two_matrices(state: impl Fn(&Param) -> State) -> Plan {
    two_matrices_over(StateOver::Shards, state)
}

fn two_matrices_over(over: StateOver, state: impl Fn(&Param) -> State) -> Plan {
    let unit = Unit::new("u").param(Param::new("a", [4, 4])).param(Param::new("b", [8, 8]));
    let spec = ModelSpec::new().unit(unit).updated_by(state);
    let mesh = Mesh::new(2, 2).expect("a mesh");
    let options = PlanOptions { state: over, ..PlanOptions::default() };
    Plan::new(spec, mesh, options).expect("two small matrices")
}

/// Shard 0 has `a` and the first half of `b`, which it owns; shard 1 has the other half of `b`, and
/// owns `a`.
#[test]
fn an_update_by_hand() {
    let plan = two_matrices(|_| State::Muon);
    let [first, second] = [0, 1].map(|rank| plan.update(Rank::new(rank)));
    // There: half of `b`. Back: `a`.
    assert_eq!(first.exchanged, Flow { calls: 2, bytes: ByteCount(4 * (32 + 16)) });
    // There: `a`. Back: half of `b`.
    assert_eq!(second.exchanged, Flow { calls: 2, bytes: ByteCount(4 * (16 + 32)) });
    assert_eq!(first.extra, ByteCount(4 * (64 + 64 + 2 * 64)));
    assert_eq!(second.extra, ByteCount(4 * (16 + 16 + 2 * 16)));
    assert_eq!(plan.update(Rank::new(3)), second, "replicas do the same");
    assert_eq!(plan.memory().update, first.extra);
    assert_eq!(plan.traffic(Rank::new(0), 5).total().calls, 5 * 2 + 5 + 1 + 2);
    assert_eq!([0, 1].map(|rank| plan.optimizer_state(Rank::new(rank)).get()), [4 * 64, 4 * 32]);
}

/// Rank 0 has `a` and owns `b`. Rank 1 has the second half of `b` and owns `a`. Rank 2 has the
/// first half of `b`, and rank 3 only padding.
#[test]
fn an_update_over_the_world_by_hand() {
    let plan = two_matrices_over(StateOver::World, |_| State::Muon);
    let updates = [0, 1, 2, 3].map(|rank| plan.update(Rank::new(rank)));
    // There: all of `b`. Back: `a`. Then the other way round for half of `b`.
    let exchanged = [64 + 16, 16 + 32, 32, 0];
    let exchanged = exchanged.map(|words| Flow { calls: 2, bytes: ByteCount(4 * words) });
    assert_eq!(updates.map(|update| update.exchanged), exchanged);
    // Received words, with the workspace of the owned matrix or the words that are sent.
    let extra = [64 + (64 + 2 * 64), 16 + (16 + 2 * 16), 32, 0];
    assert_eq!(updates.map(|update| update.extra), extra.map(|words| ByteCount(4 * words)));
    let state = [32, 32, 32, 0].map(|words| ByteCount(4 * words));
    assert_eq!([0, 1, 2, 3].map(|rank| plan.optimizer_state(Rank::new(rank))), state);
    let owned = two_matrices_over(StateOver::World, |_| State::Owned(7));
    let state = [7, 7, 0, 0].map(|words| ByteCount(4 * words));
    assert_eq!([0, 1, 2, 3].map(|rank| owned.optimizer_state(Rank::new(rank))), state);
    // Each rank writes the parameters in its slice, and the state that it owns.
    let written = [16 + 7, 32 + 7, 32, 0].map(|words| ByteCount(4 * words));
    assert_eq!([0, 1, 2, 3].map(|rank| owned.snapshot(Rank::new(rank))), written);
}

/// The memory of a model of matrices that one rank updates: on the host, and for a device on both.
fn memory_of(shapes: &[[usize; 2]]) -> (u64, [u64; 2]) {
    let params = shapes.iter().enumerate();
    let params = params.map(|(index, shape)| Param::new(format!("{index}"), *shape));
    let unit = params.fold(Unit::new("u"), Unit::param);
    let spec = ModelSpec::new().unit(unit).updated_by(|_| State::Muon);
    let plan = Plan::new(spec, Mesh::SINGLE, PlanOptions::default()).expect("a plan");
    let update = plan.update(Rank::new(0));
    let elements = |bytes: ByteCount| bytes.get() / 4;
    (elements(update.extra), update.extra_with_device.map(elements))
}

/// Three matrices of one shape, between others of the same number of elements, are a bundle.
#[test]
fn matrices_of_one_shape_are_computed_together() {
    let (host, with_device) = memory_of(&[[8, 6], [6, 8], [8, 6], [4, 12], [8, 6]]);
    let all = 5 * 48;
    // The matrix, its square, and as many columns of the product.
    assert_eq!(host, all + 3 * (48 + 36 + 6 * 8));
    assert_eq!(with_device, [all + all, all + 2 * 3 * 48 + 2 * 3 * 36]);
}

#[test]
fn a_bundle_has_at_most_two_to_the_22nd_elements_or_one_matrix() {
    let million = 1 << 20;
    let (host, with_device) = memory_of(&[[1024, 1024]; 7]);
    assert_eq!(host, 7 * million + 4 * 3 * million);
    assert_eq!(with_device, [14 * million, 7 * million + 2 * 4 * million + 2 * 4 * million]);
    // One element more, and four are too many.
    let one = 1024 * 1025;
    let (host, _) = memory_of(&[[1025, 1024]; 7]);
    assert_eq!(host, 7 * one + 3 * (one + 2 * million));
    let (host, _) = memory_of(&[[2048, 4096]; 2]);
    assert_eq!(host, 2 * 8 * million + (8 + 4 + 4) * million);
}

/// The state of elements is on one rank. A slice that is no multiple of 32 elements is padded.
#[test]
fn state_over_the_world_is_there_once() {
    let all = |over, len: usize| {
        let unit = Unit::new("u").param(Param::new("w", [len]));
        let spec = ModelSpec::new().unit(unit).updated_by(|_| State::Elements(3));
        let options = PlanOptions { state: over, ..PlanOptions::default() };
        let plan = Plan::new(spec, Mesh::new(4, 2).expect("a mesh"), options).expect("a plan");
        plan.mesh().ranks().map(|rank| plan.optimizer_state(rank).get()).sum::<u64>()
    };
    assert_eq!(all(StateOver::Shards, 256), 4 * 3 * 4 * 256);
    assert_eq!(all(StateOver::World, 256), 3 * 4 * 256);
    // Slices of 40 elements.
    assert_eq!(all(StateOver::World, 320), 3 * 4 * (8 * 64));
}

#[test]
fn states_by_hand() {
    let state =
        |state| [0, 1].map(|rank| two_matrices(|_| state).optimizer_state(Rank::new(rank)).get());
    assert_eq!(state(State::Elements(3)), [3 * 4 * (32 + 32), 3 * 4 * 32]);
    assert_eq!(state(State::EightBit { block: 20 }), [2 * 64 + 8 * (1 + 2), 2 * 32 + 8 * 2]);
    assert_eq!(state(State::Factored), [4 * (8 + 16); 2]);
    // The larger matrix goes to shard 0.
    assert_eq!(state(State::Owned(7)), [4 * 7; 2]);
    let only_large = two_matrices(|param| match param.name.as_str() {
        "b" => State::Owned(7),
        _ => State::Elements(0),
    });
    let rank = |rank| only_large.optimizer_state(Rank::new(rank)).get();
    assert_eq!([0, 1].map(rank), [4 * 7, 0]);
    // The owner gets value and gradient of the other half. It has room for those of all 64, once as
    // they came and once in their order, and a copy of the state.
    let update = only_large.update(Rank::new(0));
    assert_eq!(update.exchanged.bytes, ByteCount(4 * 2 * 32));
    assert_eq!(update.extra, ByteCount(4 * (2 * 64 + 7 + 2 * 64)));
}

#[test]
fn a_stack_is_dealt_out_matrix_by_matrix_or_whole() {
    let unit = Unit::new("u").param(Param::new("experts", [4, 16, 8]).matrices(4, 16, 8));
    let mesh = Mesh::new(1, 2).unwrap();
    let plan = Plan::new(ModelSpec::new().unit(unit), mesh, PlanOptions::default()).unwrap();
    let of = |wholes| Owners::of(&plan, wholes, |_| true).unwrap();
    let matrices = of(Wholes::Matrices);
    assert_eq!((0..4).map(|it| matrices.owner(it)).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!(matrices.matrices()[3].range(), 3 * 128..4 * 128);
    let whole = of(Wholes::Parameters);
    assert_eq!((whole.matrices().len(), whole.matrices()[0].rows), (1, 64));
}

fn refused(param: Param) -> String {
    let spec = ModelSpec::new().unit(Unit::new("u").param(param));
    let refused = Plan::new(spec, Mesh::SINGLE, PlanOptions::default());
    refused.expect_err("it is refused").to_string()
}

#[test]
fn states_matrices_and_blocks_that_cannot_be_are_refused() {
    let with = |state| {
        let mut param = Param::new("w", [6]);
        param.state = state;
        refused(param)
    };
    let rest = "the maximum is 1024 f32 an element, and a block has at least 1 element";
    assert_eq!(
        with(State::Elements(1025)),
        format!("parameter `w` cannot keep 1025 f32 an element: {rest}")
    );
    assert_eq!(
        with(State::EightBit { block: 0 }),
        format!(
            "parameter `w` cannot keep two bytes an element and two f32 a block of 0 elements: {rest}"
        )
    );
    assert_eq!(
        with(State::Muon),
        "parameter `w` of shape [6] is no matrix: declare it with `matrices`, or update it by another optimizer"
    );
    assert_eq!(
        with(State::Owned((1 << 48) + 1)),
        "the optimizer state of all owners takes 281474976710657 elements with its padding, more than 281474976710656"
    );
    for (count, rows, columns) in [(1, 2, 4), (0, 2, 3), (1, 0, 6), (2, 3, 0)] {
        let expected = format!(
            "parameter `w` of shape [6] is not a stack of matrices, {count} of {rows} x {columns}: \
             these have another number of elements"
        );
        assert_eq!(refused(Param::new("w", [6]).matrices(count, rows, columns)), expected);
    }
    assert_eq!(
        refused(Param::new("w", [6]).blocks(0)),
        "parameter `w` cannot be cut into blocks of 0 elements: that needs at least 1"
    );
}

#[test]
fn owners_name_the_first_parameter_without_matrices() {
    let unit = Unit::new("u")
        .param(Param::new("frozen", [3]).frozen())
        .param(Param::new("w", [2, 3]))
        .param(Param::new("first", [3]))
        .param(Param::new("second", [3]));
    let plan =
        Plan::new(ModelSpec::new().unit(unit), Mesh::SINGLE, PlanOptions::default()).unwrap();
    let error = Owners::of(&plan, Wholes::Matrices, |_| true).unwrap_err();
    assert_eq!(error, Error::NoMatrices { param: "first".into(), shape: vec![3] });
    let selected = Owners::of(&plan, Wholes::Matrices, |id| id.index < 2).unwrap();
    assert_eq!(selected.matrices().len(), 1);
    assert_eq!(Owners::of(&plan, Wholes::Parameters, |_| true).unwrap().matrices().len(), 3);
}

#[test]
fn an_average_is_an_f32_for_each_trained_element_of_a_shard() {
    let unit =
        Unit::new("u").param(Param::new("w", [10, 10])).param(Param::new("table", [500]).frozen());
    let plan = |state, averages: usize| {
        let spec = ModelSpec::new().unit(unit.clone()).updated_by(|_| State::Elements(1));
        let spec = (0..averages).fold(spec, |spec, _| spec.averaged());
        let options = PlanOptions { state, ..PlanOptions::default() };
        Plan::new(spec, Mesh::new(2, 3).expect("a mesh"), options).expect("a plan")
    };
    let none = plan(StateOver::Shards, 0);
    let two = plan(StateOver::Shards, 2);
    assert_eq!(none.fingerprint(), two.fingerprint(), "it is a prediction");
    // 100 elements on three ranks: 64, and 36, and none, each with padding to a multiple of 32.
    let shard = 64;
    for rank in (0..6).map(Rank::new) {
        let [before, after] = [&none, &two].map(|plan| plan.optimizer_state(rank).get());
        assert_eq!(after, before + 2 * 4 * shard);
        let own: usize = none
            .pieces_saved_by(rank)
            .iter()
            .filter(|(_, it)| it.param == 0)
            .map(|(_, it)| it.len)
            .sum();
        let [before, after] = [&none, &two].map(|plan| plan.snapshot(rank).get());
        assert_eq!(after, before + 2 * 4 * own as u64);
        // Two slices of a shard, with the padding in them.
        let over_world = [0, 2].map(|averages| plan(StateOver::World, averages));
        let [before, after] = over_world.map(|plan| plan.optimizer_state(rank).get());
        assert_eq!(after, before + 2 * 4 * shard / 2);
    }
}
