//! More work never takes less time, and a faster machine never takes more: for random models,
//! machines, meshes and options.

use std::sync::Arc;

use hsdp_sharding::{
    Accumulation, DType, Mesh, ModelSpec, Offload, Param, Plan, PlanOptions, State, StateOver, Unit,
};
use hsdp_simulator::{
    AttentionScores, AttentionShape, Batch, Computation, Error, Hints, Machine, Microbatches,
    Recompute, Time, Workload, is_lookup,
};
use proptest::prelude::*;
use proptest::sample::select;

/// A random step on a random machine.
#[derive(Clone, Debug)]
struct Case {
    workload: Workload,
    machine: Machine,
}

impl Case {
    fn time(&self) -> Time {
        match self.workload.predict(&self.machine) {
            Err(Error::TooLong) => Time::MAX,
            predicted => predicted.expect("a prediction").timing.step,
        }
    }
}

/// Sizes with every alignment, the odd ones that a power of two misses by one among them.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..2000, (0u32..11).prop_map(|bits| 1 << bits), select(vec![767, 768, 50_257])]
}

fn unit(index: usize) -> impl Strategy<Value = (Unit, bool)> {
    let matrices = prop::collection::vec((size(), size(), any::<bool>()), 1..4);
    (matrices, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        move |(matrices, has_table, is_kept, has_attention)| {
            let unit = Unit::new(format!("u{index}"));
            let unit = if is_kept { unit.keep() } else { unit };
            let table = Param::new(format!("u{index}.emb"), [50, 16]);
            let unit = if has_table { unit.param(table) } else { unit };
            let unit = matrices.into_iter().enumerate().fold(
                unit,
                |unit, (slot, (rows, columns, is_frozen))| {
                    let param = Param::new(format!("u{index}.{slot}"), [rows, columns]);
                    unit.param(if is_frozen { param.frozen() } else { param })
                },
            );
            (unit, has_attention)
        },
    )
}

fn model(scores: AttentionScores) -> impl Strategy<Value = (ModelSpec, Arc<Computation>)> {
    let units = (1usize..5).prop_flat_map(|count| (0..count).map(unit).collect::<Vec<_>>());
    (units, 1usize..9, 1usize..130, any::<bool>()).prop_map(move |(units, heads, size, is_tied)| {
        let attending: Vec<String> =
            units.iter().filter(|(_, it)| *it).map(|(unit, _)| unit.name.clone()).collect();
        let spec = units.into_iter().fold(ModelSpec::new(), |spec, (unit, _)| spec.unit(unit));
        let spec = if is_tied { spec.tie("head", "u0.0") } else { spec };
        let spec = spec.updated_by(|_| State::Elements(2));
        let attention = |unit: &Unit| {
            attending.contains(&unit.name).then_some(AttentionShape { heads, size, scores })
        };
        let hints = Hints { lookup: &is_lookup, attention: &attention };
        let computation = Computation::of(&spec, &hints).expect("a computation");
        (spec, Arc::new(computation))
    })
}

/// A bundled machine, each of whose numbers is multiplied by a factor of its own.
fn machine() -> impl Strategy<Value = Machine> {
    let names = vec!["a100-cluster", "h100-cluster", "two-core-cpu"];
    (select(names), prop::collection::vec(-3.0f64..3.0, 40)).prop_map(|(name, powers)| {
        let mut machine = Machine::bundled(name).expect("bundled");
        for (number, power) in machine.numbers().into_iter().zip(powers) {
            if !number.unit.is_whole {
                scale(&mut machine, &number.name, power.exp());
            }
        }
        machine
    })
}

/// Multiplies a number, as far as it remains possible.
fn scale(machine: &mut Machine, name: &str, by: f64) {
    let number = machine.numbers().into_iter().find(|it| it.name == name).expect("a number");
    let value = (number.value * by).clamp(number.unit.least, number.unit.most);
    machine.set(name, value, "a test").expect("possible");
}

fn case(scores: AttentionScores) -> impl Strategy<Value = Case> {
    let mesh = (1usize..7, 1usize..7);
    let options = (
        select(vec![DType::F32, DType::BF16]),
        (select(Accumulation::ALL.to_vec()), select(StateOver::ALL.to_vec())),
        0usize..4,
        select(Recompute::ALL.to_vec()),
        select(Offload::EVERY.to_vec()),
    );
    let batch = (1usize..40, 1usize..600, 1u64..6);
    (model(scores), machine(), mesh, options, batch).prop_map(
        |((spec, computation), machine, (replicas, shards), options, batch)| {
            let (dtype, (accumulation, state), prefetch, recompute, offload) = options;
            let (sequences, context, microbatches) = batch;
            let mesh = Mesh::new(replicas, shards).expect("a mesh");
            let options = PlanOptions {
                param_dtype: dtype,
                reduce_dtype: dtype,
                accumulation,
                prefetch,
                state,
                ..PlanOptions::default()
            };
            let offload = if machine.device().is_some() { offload } else { Offload::None };
            let workload = Workload {
                plan: Arc::new(Plan::new(spec, mesh, options).expect("a plan")),
                computation,
                batch: Batch { sequences, context, dtype, recompute },
                microbatches: Microbatches::Given(microbatches),
                offload,
            };
            Case { workload, machine }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn more_sequences_never_take_less_time(case in case(AttentionScores::Stored), more in 1usize..20) {
        let mut longer = case.clone();
        longer.workload.batch.sequences += more;
        prop_assert!(case.time() <= longer.time(), "{} {}", case.time(), longer.time());
    }

    #[test]
    fn more_microbatches_never_take_less_time(case in case(AttentionScores::Stored), more in 1u64..5) {
        let mut longer = case.clone();
        let Microbatches::Given(count) = case.workload.microbatches else { unreachable!() };
        longer.workload.microbatches = Microbatches::Given(count + more);
        prop_assert!(case.time() <= longer.time(), "{} {}", case.time(), longer.time());
    }

    /// Tokens are no stride in memory.
    #[test]
    fn longer_sequences_never_take_less_time(case in case(AttentionScores::Fused), more in 1usize..20) {
        let mut longer = case.clone();
        longer.workload.batch.context += more;
        prop_assert!(case.time() <= longer.time(), "{} {}", case.time(), longer.time());
    }

    /// The rows of scores that are stored have a score for each token: rows of one alignment are
    /// compared.
    #[test]
    fn longer_rows_of_scores_never_take_less_time(case in case(AttentionScores::Stored), more in 1usize..4) {
        let mut longer = case.clone();
        longer.workload.batch.context += 8 * more;
        prop_assert!(case.time() <= longer.time(), "{} {}", case.time(), longer.time());
    }

    /// Each bandwidth, rate and part of one grows, and each duration gets shorter.
    #[test]
    fn a_faster_machine_never_takes_more_time(case in case(AttentionScores::Stored), by in 1.0f64..5.0) {
        for number in case.machine.numbers() {
            let by = match number.unit.name {
                "B/s" | "flop/s" => by,
                "" if !number.unit.is_whole => by,
                "s" | "flop" => 1.0 / by,
                _ => continue,
            };
            let mut faster = case.clone();
            scale(&mut faster.machine, &number.name, by);
            let [slow, fast] = [case.time(), faster.time()];
            prop_assert!(fast <= slow, "{} x {by}: {slow}, then {fast}", number.name);
        }
    }
}
