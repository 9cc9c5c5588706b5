//! How long it takes to plan many units for 1,024 ranks.

use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::step::{DryRun, Rules};
use hsdp_sharding::{Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, State, Unit};
use hsdp_train::{Failure, print};

use crate::options::Options;

/// In seconds.
const GOAL: f64 = 1.0;

/// The width of a block.
const WIDTH: usize = 768;

/// The parameters of a transformer block: their names, and how wide they are, in `WIDTH`s. Vectors
/// have no second one.
const BLOCK: [(&str, usize, Option<usize>); 12] = [
    ("ln_1.weight", 1, None),
    ("ln_1.bias", 1, None),
    ("attn.qkv.weight", 3, Some(1)),
    ("attn.qkv.bias", 3, None),
    ("attn.proj.weight", 1, Some(1)),
    ("attn.proj.bias", 1, None),
    ("ln_2.weight", 1, None),
    ("ln_2.bias", 1, None),
    ("mlp.up.weight", 4, Some(1)),
    ("mlp.up.bias", 4, None),
    ("mlp.down.weight", 1, Some(4)),
    ("mlp.down.bias", 1, None),
];

/// What makes a parameter of another layout.
type Adapt = fn(Param) -> Param;

pub(crate) fn measure(options: &Options) -> Result<(), Failure> {
    let units = options.planned_units;
    print(format_args!("{units} units of {} parameters for 1,024 ranks", BLOCK.len()))?;
    let mesh = Mesh::new(16, 64)?;
    let adapts: [(&str, Adapt); 3] = [
        ("cut anywhere", |param| param),
        ("by whole rows", |param| param.rows(1)),
        ("matrices with owners", with_owner),
    ];
    for (name, adapt) in adapts {
        let spec = (0..units).fold(ModelSpec::new(), |spec, unit| spec.unit(block(unit, adapt)));
        let started = Instant::now();
        let plan = Plan::new(spec, mesh, PlanOptions::default())?;
        let planned = started.elapsed().as_secs_f64();
        let bytes = plan.traffic(Rank::new(1023), 8).total().bytes;
        let memory = plan.memory().total();
        let with_costs = started.elapsed().as_secs_f64();
        print(format_args!(
            "  {name}: planned in {planned:.3} s, with a rank's costs ({bytes} a step, {memory} held) {with_costs:.3} s; \
             the goal is {GOAL} s"
        ))?;
        let started = Instant::now();
        let outputs = DryRun::of(&Arc::new(plan), Rules::default(), None, 2).outputs().count();
        let time = started.elapsed().as_secs_f64();
        print(format_args!(
            "  {name}: a step of two microbatches, {outputs} outputs, {time:.3} s"
        ))?;
    }
    Ok(())
}

/// Has one rank update a matrix by Muon, as a whole.
fn with_owner(mut param: Param) -> Param {
    if param.as_matrices().is_some() {
        param.state = State::Muon;
    }
    param
}

fn block(index: u32, adapt: Adapt) -> Unit {
    let param = |unit: Unit, (name, rows, columns): (&str, usize, Option<usize>)| {
        let name = format!("h.{index}.{name}");
        let param = match columns {
            Some(columns) => Param::new(name, [rows * WIDTH, columns * WIDTH]),
            None => Param::new(name, [rows * WIDTH]),
        };
        unit.param(adapt(param))
    };
    BLOCK.into_iter().fold(Unit::new(format!("h.{index}")), param)
}
