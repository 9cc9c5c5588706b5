//! Ten thousand units for a thousand ranks have the costs of ten, a thousand times, and are planned
//! in less than five seconds, as their steps are, by a debug build: nothing is quadratic in the
//! units. (It takes a fraction of a second in a release build.)

use std::sync::Arc;
use std::time::Duration;

use hsdp_sharding::step::{DryRun, LossScale, Rules, Sequences, UnitOrder};
use hsdp_sharding::{
    Accumulation, ByteCount, DType, Mesh, ModelSpec, Offload, Owners, Param, ParamId, Plan,
    PlanOptions, Rank, State, StateOver, Unit, Wholes,
};

const UNITS: usize = 10_000;

/// Limit for all of a plan, from the first parameter to the last rank's costs, and for the steps of
/// all modes together.
const LIMIT: Duration = Duration::from_secs(5);

/// Runs `work` within the limit, in time of this thread: other programs do not count.
fn in_time<T>(work: impl FnOnce() -> T) -> T {
    let before = thread_time();
    let output = work();
    let took = thread_time() - before;
    assert!(took < LIMIT, "took {took:?}");
    output
}

#[cfg(target_os = "linux")]
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = time.tv_sec.unsigned_abs();
    Duration::new(seconds, u32::try_from(time.tv_nsec).expect("below a second"))
}

/// Elsewhere only the counts are tested.
#[cfg(not(target_os = "linux"))]
fn thread_time() -> Duration {
    Duration::ZERO
}

/// A transformer block of twelve parameters.
fn block(index: usize, adapt: fn(Param) -> Param) -> Unit {
    let width = 768;
    let shapes: [(&str, &[usize]); 12] = [
        ("ln_1.weight", &[width]),
        ("ln_1.bias", &[width]),
        ("attn.qkv.weight", &[3 * width, width]),
        ("attn.qkv.bias", &[3 * width]),
        ("attn.proj.weight", &[width, width]),
        ("attn.proj.bias", &[width]),
        ("ln_2.weight", &[width]),
        ("ln_2.bias", &[width]),
        ("mlp.up.weight", &[4 * width, width]),
        ("mlp.up.bias", &[4 * width]),
        ("mlp.down.weight", &[width, 4 * width]),
        ("mlp.down.bias", &[width]),
    ];
    shapes.into_iter().fold(Unit::new(format!("h.{index}")), |unit, (name, shape)| {
        unit.param(adapt(Param::new(format!("h.{index}.{name}"), shape)))
    })
}

/// Has Muon update matrices.
fn by_muon(mut param: Param) -> Param {
    if param.as_matrices().is_some() {
        param.state = State::Muon;
    }
    param
}

/// Plans a model of blocks for 1,024 ranks.
fn planned(units: usize, adapt: fn(Param) -> Param) -> Plan {
    let units = (0..units).map(|index| block(index, adapt));
    let spec = units.fold(ModelSpec::new(), ModelSpec::unit);
    let mesh = Mesh::new(16, 64).expect("1024 ranks");
    Plan::new(spec, mesh, PlanOptions::default()).expect("a transformer")
}

/// Returns the pieces of the last rank, and the bytes that it holds and receives for all units.
fn costs(plan: &Plan) -> [u64; 3] {
    let pieces = plan.layouts().iter().map(|layout| layout.pieces(63).count()).sum::<usize>();
    let traffic = plan.traffic(Rank::new(1023), 8);
    [pieces as u64, plan.memory().shard.get(), traffic.all_gather.bytes.get()]
}

#[test]
fn ten_thousand_units_for_1024_ranks() {
    for adapt in [|param| param, |param: Param| param.rows(1), by_muon] {
        let of_ten = costs(&planned(10, adapt));
        let thousandfold = of_ten.map(|it| it * UNITS as u64 / 10);
        assert_eq!(in_time(|| costs(&planned(UNITS, adapt))), thousandfold);
    }
}

/// Replicas that divide state have numbers for each rank. Each element has one master, and each
/// matrix goes to its owner and back, except for the part that the owner has.
#[test]
fn slices_of_300_units_on_4096_ranks() {
    let spec = (0..300).map(|index| block(index, by_muon)).fold(ModelSpec::new(), ModelSpec::unit);
    let mesh = Mesh::new(16, 256).expect("4096 ranks");
    let options =
        PlanOptions { param_dtype: DType::BF16, state: StateOver::World, ..PlanOptions::default() };
    let plan = Plan::new(spec, mesh, options).expect("a transformer");
    let [masters, exchanged] = in_time(|| {
        assert!(plan.memory().shard >= plan.memory_offloaded(Offload::All).shard);
        let masters = mesh.ranks().map(|rank| plan.masters(rank));
        let exchanged = mesh.ranks().map(|rank| plan.traffic(rank, 8).update.bytes);
        [masters.sum::<ByteCount>(), exchanged.sum()]
    });
    let elements = plan.layouts().iter().map(|layout| layout.full_len() as u64).sum::<u64>();
    assert_eq!(masters.get(), 4 * elements);
    let of_matrices = 2 * 4 * 300 * 12 * 768 * 768;
    assert!((of_matrices * 99 / 100..=of_matrices).contains(&exchanged.get()), "{exchanged}");
}

/// No owner has more work than another by more than the largest matrix.
#[test]
fn forty_thousand_matrices_with_owners_for_1024_ranks() {
    let plan = planned(UNITS, by_muon);
    let is_matrix = |id: ParamId| plan.spec()[id].state == State::Muon;
    let owners = in_time(|| Owners::of(&plan, Wholes::Matrices, is_matrix).expect("owners"));
    let matrices = owners.matrices();
    assert_eq!(matrices.len(), 4 * UNITS);
    // The multiplications of a Newton-Schulz step, in cubes of the width.
    let cost = |rows: usize, columns: usize| {
        let short = rows.min(columns) / 768;
        let long = rows.max(columns) / 768;
        2 * short * short * long + short * short * short
    };
    let mut work = [0; 64];
    for (index, matrix) in matrices.iter().enumerate() {
        work[owners.owner(index)] += cost(matrix.rows, matrix.columns);
    }
    let [least, most] = [work.iter().min(), work.iter().max()].map(|it| *it.expect("64 owners"));
    assert!(most - least <= cost(3072, 768), "from {least} to {most}");
}

/// Ranks ask each other for overflows, so that they await all operations of the step at its end.
#[test]
fn ten_thousand_units_in_a_step() {
    let rules =
        Rules { order: UnitOrder::Error, loss_scale: LossScale::Dynamic, ..Rules::default() };
    in_time(|| {
        for accumulation in Accumulation::ALL {
            outputs_are_proportional_to_units(accumulation, StateOver::Shards, rules);
        }
    });
}

/// The slices of each unit are gathered and awaited on their own, also in one sequence.
#[test]
fn slices_of_ten_thousand_units_in_a_step() {
    in_time(|| {
        for sequences in [Sequences::OfEachChannel, Sequences::One] {
            let rules = Rules { order: UnitOrder::Error, sequences, ..Rules::default() };
            outputs_are_proportional_to_units(Accumulation::default(), StateOver::World, rules);
        }
    });
}

fn outputs_are_proportional_to_units(accumulation: Accumulation, state: StateOver, rules: Rules) {
    let outputs = |units: usize| {
        let unit = |index: usize| {
            Unit::new(format!("{index}")).param(Param::new(format!("{index}.w"), [4]))
        };
        let spec = (0..units).map(unit).fold(ModelSpec::new(), ModelSpec::unit);
        let options = PlanOptions { accumulation, state, ..PlanOptions::default() };
        let mesh = Mesh::new(16, 64).expect("1024 ranks");
        let plan = Arc::new(Plan::new(spec, mesh, options).expect("a plan"));
        DryRun::of(&plan, rules, None, 2).outputs().count()
    };
    let of_ten = outputs(20) - outputs(10);
    assert!(of_ten >= 10, "{accumulation}: {of_ten}");
    let expected = outputs(10) + (UNITS - 10) / 10 * of_ten;
    assert_eq!(outputs(UNITS), expected, "{accumulation}");
}

/// The costs of a plan take no memory for each shard.
#[test]
fn a_shard_group_may_have_billions_of_ranks() {
    let spec = ModelSpec::new().unit(block(0, by_muon));
    let mesh = Mesh::new(1, u32::MAX as usize).expect("a mesh");
    let plan = Plan::new(spec, mesh, PlanOptions::default()).expect("a transformer");
    // The largest matrix, of 3072 x 768, and its workspace. Most ranks have a piece of 32 elements.
    let of_matrix = 3072 * 768 + 3072 * 768 + 2 * 768 * 768;
    assert_eq!(plan.memory().update.get(), 4 * of_matrix);
    assert_eq!(plan.memory().optimizer.get(), 4 * 2 * 32);
    assert_eq!(plan.update(Rank::new(u32::MAX as usize - 1)).extra.get(), 0);
}
