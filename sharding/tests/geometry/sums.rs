//! The all-reduces of the sums of factored state, against a count that goes value by value.

use hsdp_sharding::{
    ByteCount, Flow, Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, State, StateOver, Unit,
};

use crate::optimizers::{factors, trainable};

/// The all-reduces of each rank. It gets the parts of all other ranks of each value of its slice,
/// and the sum of each other value. The values of a slice are as many as if they were dealt out one
/// by one.
pub(crate) fn counted(plan: &Plan) -> Vec<Flow> {
    let mut lens = [0; 2];
    for (_, param) in trainable(plan).into_iter().filter(|(_, it)| it.state == State::Factored) {
        lens[0] += if param.shape.len() > 1 { 1 + factors(&param.shape) } else { 1 };
        lens[1] += 1;
    }
    let ranks = plan.mesh().world_size();
    let of = |rank: usize| {
        let values = lens.into_iter().flat_map(|len| 0..len);
        let received = values.map(|value| if value % ranks == rank { ranks - 1 } else { 1 });
        match (ranks, lens[1]) {
            (1, _) | (_, 0) => Flow::NONE,
            _ => Flow { calls: 2, bytes: ByteCount::of(8 * received.sum::<usize>()) },
        }
    };
    (0..ranks).map(of).collect()
}

/// The memory of these values, which are all there at once, and of the new factors; and that of the
/// factors alone.
pub(crate) fn memory(plan: &Plan) -> (usize, usize) {
    let factored = trainable(plan).into_iter().filter(|(_, it)| it.state == State::Factored);
    let of_param = |(_, param): (_, Param)| match param.shape.len() {
        2.. => (16 + 12 * factors(&param.shape), 4 * factors(&param.shape)),
        _ => (16, 0),
    };
    factored.map(of_param).fold((0, 0), |all, it| (all.0 + it.0, all.1 + it.1))
}

fn plan(mesh: [usize; 2], state: impl Fn(&Param) -> State) -> Plan {
    plan_over(StateOver::Shards, mesh, state)
}

fn plan_over(over: StateOver, mesh: [usize; 2], state: impl Fn(&Param) -> State) -> Plan {
    let unit = Unit::new("u")
        .param(Param::new("stack", [2, 3, 5]))
        .param(Param::new("bias", [40]))
        .param(Param::new("frozen", [7, 9]).frozen());
    let spec = ModelSpec::new().unit(unit).updated_by(state);
    let mesh = Mesh::new(mesh[0], mesh[1]).expect("a mesh");
    let options = PlanOptions { state: over, ..PlanOptions::default() };
    Plan::new(spec, mesh, options).expect("a small model")
}

/// There are 1 + 2 · 3 + 2 · 5 values of the stack and one of the bias, then one of each.
#[test]
fn sums_by_hand() {
    let plan = plan([2, 4], |_| State::Factored);
    let summed = |rank| plan.update(Rank::new(rank)).summed;
    // Slices of 3, 3 and then 2 values, then of 1, 1 and then 0.
    let of = |first: [u64; 2], second: [u64; 2]| {
        let [first, second] = [first, second].map(|[own, rest]| 7 * own + rest);
        Flow { calls: 2, bytes: ByteCount(8 * (first + second)) }
    };
    assert_eq!([0, 1].map(summed), [of([3, 15], [1, 1]); 2]);
    assert_eq!([2, 3, 4, 5, 6, 7].map(summed), [of([2, 16], [0, 2]); 6]);
    let over_world = plan_over(StateOver::World, [2, 4], |_| State::Factored);
    for rank in plan.mesh().ranks() {
        assert_eq!(over_world.update(rank), plan.update(rank), "both modes have the same sums");
    }
    let update = plan.update(Rank::new(0));
    // 18 and 2 values in f64, and 16 new factors in f32.
    assert_eq!((update.exchanged, update.extra), (Flow::NONE, ByteCount(8 * 20 + 4 * 16)));
    assert_eq!(plan.traffic(Rank::new(0), 3).update, update.flow());
    assert_eq!(plan.traffic(Rank::new(0), 0).update, Flow::NONE);
}

#[test]
fn only_factored_state_is_summed_over_several_ranks() {
    let summed = |plan: Plan| plan.update(Rank::new(0)).summed;
    assert_eq!(summed(plan([1, 1], |_| State::Factored)), Flow::NONE);
    // 18 values and two on four ranks, the first of which sums five and one.
    let replicas = Flow { calls: 2, bytes: ByteCount(8 * (3 * 5 + 13 + 3 + 1)) };
    assert_eq!(summed(plan([4, 1], |_| State::Factored)), replicas);
    assert_eq!(summed(plan([1, 4], |_| State::Elements(1))), Flow::NONE);
    let bias = |param: &Param| match param.shape.len() {
        1 => State::Factored,
        _ => State::Muon,
    };
    let unit = Unit::new("u").param(Param::new("w", [8, 8])).param(Param::new("bias", [8]));
    let spec = ModelSpec::new().unit(unit).updated_by(bias);
    let plan = Plan::new(spec, Mesh::new(1, 2).expect("a mesh"), PlanOptions::default());
    let update = plan.expect("a small model").update(Rank::new(1));
    // The other rank has the only value of each sum, and sends the finished one.
    assert_eq!(update.summed, Flow { calls: 2, bytes: ByteCount(8 * 2) });
    assert_eq!(update.flow(), update.exchanged + update.summed);
    assert_eq!(update.exchanged.calls, 2);
}
