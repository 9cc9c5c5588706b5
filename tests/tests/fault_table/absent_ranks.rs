//! Row 23: some ranks have more batches than others. tests/tests/step/uneven_inputs has the cases
//! one by one.

use std::collections::BTreeMap;
use std::time::Instant;

use hsdp::{
    AdamW, AdamWOptions, EndOfRun, Error, Mesh, ModelOptions, NextStep, Optimizer, ShardedModel,
    StepOptions, Uneven, World,
};
use hsdp_tests::support::springs::{self, Batch};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::runner::Happened;

type Parameters = BTreeMap<String, Vec<f32>>;

/// By rank, batches that it has.
const BATCHES: [u64; 4] = [3, 4, 3, 3];

pub(crate) fn uneven() -> Happened {
    let started = Instant::now();
    let (refused, kept) = trained(Uneven::Error);
    let took = started.elapsed();
    let refused = refused.expect_err("it is the policy");
    assert!(
        refused.starts_with("step 3: ranks 0, 2, 3 have no more data, ranks 1 still have data"),
        "{refused}"
    );
    assert_near(&kept, &reference(3, &[0, 1, 2, 3]));

    let (stopped, kept) = trained(Uneven::Stop);
    let EndOfRun { step, supply } = stopped.expect("it is no error");
    assert_eq!((step, supply.ready.len(), supply.exhausted.len()), (3, 1, 3));
    assert_near(&kept, &reference(3, &[0, 1, 2, 3]));

    let (ended, kept) = trained(Uneven::ZeroWeight);
    assert_eq!(ended.expect("it is no error").step, 4);
    assert_near(&kept, &reference(4, &[1]));
    Happened::in_time(&refused, took)
}

/// How the run ended for all ranks, and the parameters that all have then: replicas to the bit.
fn trained(uneven: Uneven) -> (Result<EndOfRun, String>, Parameters) {
    let options = ModelOptions { uneven, ..ModelOptions::on(mesh(2, 2)) };
    common(on_ranks(BATCHES.len(), |world| {
        let batches = BATCHES[world.rank().index()];
        let mut model = springs::model(world, &options)?;
        let ended = train(&mut model, batches).map_err(|error| error.to_string());
        Ok((ended, model.full_parameters()?))
    }))
}

fn train(model: &mut ShardedModel, batches: u64) -> Result<EndOfRun, Error> {
    let rank = model.rank().index();
    let mut adamw = AdamW::new(model, AdamWOptions::default());
    loop {
        let number = model.committed_steps();
        let begin = StepOptions::microbatches(1);
        let begin = if number < batches { begin } else { begin.without_data() };
        let mut step = match model.next_step(begin)? {
            NextStep::Step(step) => step,
            NextStep::End(end) => return Ok(end),
        };
        if number < batches {
            springs::microbatch(&mut step, Batch::of(rank, number, 0))?;
        }
        let gradients = step.finish()?;
        adamw.step(model, gradients)?;
    }
}

/// Returns the parameters of one rank that trains on the batches of all in each of `steps` steps,
/// and on the batches of `last` in the fourth.
fn reference(steps: u64, last: &[usize]) -> Parameters {
    let options = ModelOptions::on(Mesh::SINGLE);
    let model = springs::model(World::single(), &options);
    let mut model = model.expect("a model");
    let mut adamw = AdamW::new(&model, AdamWOptions::default());
    for number in 0..steps {
        let ranks = if number < 3 { &[0, 1, 2, 3] } else { last };
        let mut step = model.begin_step(StepOptions::as_many_as_come()).expect("a step");
        for rank in ranks {
            springs::microbatch(&mut step, Batch::of(*rank, number, 0)).expect("a microbatch");
        }
        let gradients = step.finish().expect("gradients");
        adamw.step(&mut model, gradients).expect("an update");
    }
    model.full_parameters().expect("parameters")
}

/// The same, but for the order of sums.
fn assert_near(found: &Parameters, expected: &Parameters) {
    for (name, expected) in expected {
        for (found, expected) in found[name].iter().zip(expected) {
            let off = (found - expected).abs();
            assert!(off <= 2e-6 * expected.abs().max(1.0), "{name}: {found}, {expected}");
        }
    }
}
