//! Ten thousand units for a thousand ranks are planned in less than five seconds, and so are their
//! steps, by a debug build that shares its machine with other tests: nothing is quadratic in the
//! units. (It takes a fraction of a second where it is alone.)

use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::step::{DryRun, LossScale, Rules, UnitOrder};
use hsdp_sharding::{Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, State, Unit};

const UNITS: usize = 10_000;

/// Limit for all of a plan, from the first parameter to the last rank's costs, and for the steps of
/// all modes together.
const LIMIT: Duration = Duration::from_secs(5);

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

/// A matrix is updated by Muon.
fn by_muon(mut param: Param) -> Param {
    if param.as_matrices().is_some() {
        param.state = State::Muon;
    }
    param
}

/// Builds and plans a model, and computes all costs of one rank. Returns a text with the times.
fn plan_all(adapt: fn(Param) -> Param) -> String {
    let started = Instant::now();
    let units = (0..UNITS).map(|index| block(index, adapt));
    let spec = units.fold(ModelSpec::new(), ModelSpec::unit);
    let built = started.elapsed();
    let mesh = Mesh::new(16, 64).expect("1024 ranks");
    let plan = Plan::new(spec, mesh, PlanOptions::default()).expect("a transformer");
    let planned = started.elapsed() - built;
    let shard = plan.layouts().iter().map(|layout| layout.pieces(63).count()).sum::<usize>();
    let traffic = plan.traffic(Rank::new(1023), 8).total();
    let memory = plan.memory().total();
    let total = started.elapsed();
    assert!(total < LIMIT, "took {total:?}");
    format!(
        "spec {built:?}, plan {planned:?}, with costs {total:?}; \
         the last rank has {shard} pieces and {memory}, and receives {} in a step",
        traffic.bytes
    )
}

#[test]
fn ten_thousand_units_for_1024_ranks() {
    println!("{}", plan_all(|param| param));
}

#[test]
fn ten_thousand_units_by_whole_rows_for_1024_ranks() {
    println!("{}", plan_all(|param| param.rows(1)));
}

#[test]
fn forty_thousand_matrices_with_owners_for_1024_ranks() {
    println!("{}", plan_all(by_muon));
}

/// Ranks ask each other for overflows, so that they await all operations of the step at its end.
#[test]
fn ten_thousand_units_in_a_step() {
    let units = (0..UNITS)
        .map(|index| Unit::new(format!("{index}")).param(Param::new(format!("{index}.w"), [4])));
    let spec = units.fold(ModelSpec::new(), ModelSpec::unit);
    let rules =
        Rules { order: UnitOrder::Error, loss_scale: LossScale::Dynamic, ..Rules::default() };
    let started = Instant::now();
    for accumulation in Accumulation::ALL {
        let options = PlanOptions { accumulation, ..PlanOptions::default() };
        let mesh = Mesh::new(16, 64).expect("1024 ranks");
        let plan = Arc::new(Plan::new(spec.clone(), mesh, options).expect("a plan"));
        let outputs = DryRun::of(&plan, rules, None, 2).outputs().count();
        println!("{accumulation}: {outputs} outputs after {:?}", started.elapsed());
    }
    let total = started.elapsed();
    assert!(total < LIMIT, "took {total:?}");
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
