//! How long it takes to plan many units for 1,024 ranks.

use std::time::Instant;

use hsdp_sharding::{Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, Unit};
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
    let by_rows: Adapt = |param| param.rows(1);
    for (name, adapt) in [("cut anywhere", (|param| param) as Adapt), ("by whole rows", by_rows)] {
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
    }
    Ok(())
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
