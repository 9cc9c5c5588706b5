//! A GPT under candle's autograd, sharded and whole.

use candle_core::{Device, Tensor};
use hsdp::{
    Accumulation, AdamW, AdamWOptions, Mesh, ModelOptions, Objective, Optimizer as _, Param,
    Precision, ShardedModel, StepOptions, World,
};
use hsdp_candle::{Pass, Plain};
use hsdp_models::gpt::{self, Gpt, GptConfig};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::parity::baseline::{Average, Averaged, Contributions, Recipe, WholeOptimizer};
use crate::parity::{Named, Trace, assert_near, assert_same_bits, meshes};

const STEPS: usize = 2;
const MICROBATCHES: usize = 2;
const BATCH: usize = 2;
/// A power of two together with the batch: the weight of a microbatch comes out of every gradient without a trace.
const CONTEXT: usize = 8;
const CONFIG: GptConfig = GptConfig { vocab: 19, context: CONTEXT, width: 12, heads: 3, layers: 2 };
const ADAMW: AdamWOptions =
    AdamWOptions { learning_rate: 3e-3, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };

fn initial(param: &Param) -> Vec<f32> {
    gpt::init(param, 7)
}

/// A rank's inputs and targets of one microbatch, both `[BATCH, CONTEXT]`.
fn sequences(step: usize, microbatch: usize, rank: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let first = ((step * MICROBATCHES + microbatch) * 8 + rank) * BATCH * CONTEXT;
    let tokens = |shift| {
        let token =
            |index| u32::try_from(index * index % CONFIG.vocab).expect("below the vocabulary");
        let tokens: Vec<u32> = (first + shift..).map(token).take(BATCH * CONTEXT).collect();
        Tensor::from_vec(tokens, (BATCH, CONTEXT), &Device::Cpu)
    };
    Ok((tokens(0)?, tokens(1)?))
}

fn sharded(mesh: Mesh, accumulation: Accumulation, objective: Objective) -> Vec<Trace> {
    let options = ModelOptions { accumulation, objective, ..ModelOptions::on(mesh) };
    let train = |world| Ok(train(world, options.clone()).expect("the rank trains"));
    common(on_ranks(mesh.world_size(), train))
}

fn train(world: World, options: ModelOptions) -> Result<Vec<Trace>, hsdp_candle::Error> {
    let rank = world.rank().index();
    let gpt = Gpt::new(CONFIG).expect("sizes that go together");
    let mut model = ShardedModel::new(world, CONFIG.spec(), options, initial)?;
    let mut adamw = AdamW::new(&model, ADAMW);
    let mut traces = Vec::new();
    for step_index in 0..STEPS {
        let mut step = model.begin_step(StepOptions::microbatches(MICROBATCHES))?;
        for microbatch in 0..MICROBATCHES {
            let (inputs, targets) = sequences(step_index, microbatch, rank)?;
            let pass = Pass::new(step.microbatch()?)?;
            let loss = gpt.loss(&pass, &inputs, &targets)?;
            pass.backward(&loss, (BATCH * CONTEXT) as u64)?;
        }
        let gradients = step.finish()?;
        let (loss, norm, full) = (gradients.loss(), gradients.norm(), gradients.full(&model)?);
        adamw.step(&mut model, gradients)?;
        traces.push(Trace { loss, norm, gradients: full, parameters: model.full_parameters()? });
    }
    Ok(traces)
}

/// The loss of a microbatch of one rank, and its gradient, on whole parameters.
fn whole_gradient(
    plain: &Plain,
    (inputs, targets): (Tensor, Tensor),
) -> candle_core::Result<(f64, Named)> {
    let gpt = Gpt::new(CONFIG).expect("sizes that go together");
    let loss = gpt.loss(plain, &inputs, &targets)?;
    let mut gradients = loss.backward()?;
    let mut named = Named::new();
    for (name, var) in plain.parameters() {
        let gradient = gradients.remove(var).expect("every parameter is used");
        named.insert(name.clone(), gradient.flatten_all()?.to_vec1()?);
    }
    Ok((loss.to_dtype(candle_core::DType::F64)?.to_scalar()?, named))
}

fn whole_step(
    step: usize,
    mesh: Mesh,
    parameters: &Named,
    (accumulation, objective): (Accumulation, Objective),
) -> candle_core::Result<(f64, Averaged)> {
    let plain = Plain::new(CONFIG.spec(), parameters, Precision::default())?;
    let (mut contributions, mut losses) = (Contributions::new(), 0.0);
    for microbatch in 0..MICROBATCHES {
        let mut of_ranks = Vec::new();
        for rank in 0..mesh.world_size() {
            let (loss, gradient) = whole_gradient(&plain, sequences(step, microbatch, rank)?)?;
            losses += loss;
            of_ranks.push(gradient);
        }
        contributions.push(of_ranks);
    }
    // Contributions are gradients of means here, so a mean of means is what the weights amount to.
    let means = mesh.world_size() * MICROBATCHES;
    let average = Average { mesh, accumulation, objective, weight: means as u64 };
    let count = f64::from(u32::try_from(means).expect("few"));
    Ok((losses / count, average.of(&contributions)))
}

fn equals_the_baseline(mesh: Mesh, accumulation: Accumulation, objective: Objective) {
    let mut parameters: Named =
        CONFIG.spec().params().map(|(_, param)| (param.name.clone(), initial(param))).collect();
    let mut optimizer = WholeOptimizer::new(Recipe::AdamW(ADAMW), &parameters);
    for (step, trace) in sharded(mesh, accumulation, objective).iter().enumerate() {
        let context = format!("step {step} on {mesh}, {accumulation}, {objective:?}");
        let (loss, Averaged { gradients, norm }) =
            whole_step(step, mesh, &parameters, (accumulation, objective))
                .expect("the baseline trains");
        assert_near(trace.loss, loss, &context);
        assert_near(trace.norm, norm, &context);
        assert_same_bits(&trace.gradients, &gradients, &context);
        optimizer.step(&mut parameters, &gradients, 1.0);
        assert_same_bits(&trace.parameters, &parameters, &context);
    }
}

#[test]
fn a_sharded_gpt_equals_the_whole_one_bit_for_bit() {
    for mesh in meshes() {
        equals_the_baseline(mesh, Accumulation::ReduceScatter, Objective::WeightedMean);
    }
}

#[test]
fn a_sharded_gpt_equals_the_whole_one_in_every_mode_and_mean() {
    for accumulation in Accumulation::ALL {
        for objective in [Objective::WeightedMean, Objective::RankMean] {
            equals_the_baseline(mesh(2, 2), accumulation, objective);
        }
    }
}

#[test]
fn a_sharded_gpt_is_bit_identical_when_it_is_trained_again() {
    let train = || sharded(mesh(2, 2), Accumulation::ReduceScatter, Objective::WeightedMean);
    assert_eq!(train(), train());
}
