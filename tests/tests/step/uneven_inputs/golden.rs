//! The smallest uneven run, in numbers: `w = 1`, a learning rate of 0.1, `L = w x`, where rank 0
//! has 1 and 2, and rank 1 has 1, 2 and 4.

use hsdp::{NextStep, Optimizer as _, Sgd, SgdOptions, ShardedModel, StepOptions, Uneven, World};
use hsdp_tests::support::models::one_parameter;
use hsdp_tests::support::slopes;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

const DATA: [&[f32]; 2] = [&[1.0, 2.0], &[1.0, 2.0, 4.0]];

/// The gradients of all steps, and the `w` after the last.
fn run(world: World) -> Result<(Vec<f32>, f32), hsdp::Error> {
    let data = DATA[world.rank().index()];
    let options =
        hsdp::ModelOptions { uneven: Uneven::ZeroWeight, ..hsdp::ModelOptions::on(mesh(1, 2)) };
    let mut model = ShardedModel::new(world, one_parameter(1), options, |_| vec![1.0])?;
    let learning_rate = 0.1;
    let mut sgd = Sgd::new(&model, SgdOptions { learning_rate, ..SgdOptions::default() });
    let mut gradients = Vec::new();
    for number in 0.. {
        let begin = StepOptions::microbatches(1);
        let begin = if number < data.len() { begin } else { begin.without_data() };
        let NextStep::Step(mut step) = model.next_step(begin)? else { break };
        if let Some(slope) = data.get(number) {
            slopes::microbatch(&mut step, *slope)?;
        }
        let reduced = step.finish()?;
        gradients.push(reduced.full(&model)?["w"][0]);
        sgd.step(&mut model, reduced)?;
    }
    Ok((gradients, model.full_parameters()?["w"][0]))
}

/// The last mean is over the one rank that has data: not 2, as where it is divided by the number of
/// ranks at the start, which would end at 0.5.
#[test]
fn a_mean_is_over_what_there_is() {
    let (gradients, w) = common(on_ranks(2, run));
    assert_eq!(gradients, [1.0, 2.0, 4.0]);
    assert!((w - 0.3).abs() <= 4.0 * f32::EPSILON, "{w}");
}
