//! The program of docs/guide.md: a model of its own with all the surroundings of a run.

use std::process::ExitCode;

use candle_core::{Device, Tensor};
use clap::Parser;
use hsdp_candle::Error;
use hsdp_candle::prelude::*;
use hsdp_train::{EvaluationOptions, Failure, Ranks, RunOptions, Training};

/// Trains a model to sum the numbers of a row
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    evaluation: EvaluationOptions,
    /// Number of steps
    #[arg(long, default_value_t = 100)]
    steps: usize,
}

#[global_allocator]
static ALLOCATOR: hsdp_train::Allocator = hsdp_train::allocator();

fn main() -> ExitCode {
    hsdp_train::main("rows", |options: &Options| &options.run, train)
}

fn train(options: &Options, ranks: &Ranks) -> Result<(), Failure> {
    let rate = LearningRate::warmup_cosine(0.02, 0.001, 5, options.steps as u64);
    // Reads files, once in each process. Here it makes the rows of the evaluation.
    let read = || Ok(batch(0)?);
    ranks.run(read, |setup, held_out| {
        let model = ShardedModel::new(setup.world(), spec(), setup.model_options(), initial)?;
        let adamw = AdamW::new(&model, AdamWOptions::default());
        let evaluation = options.evaluation.clone();
        let training = Training { evaluation, ..Training::of_steps(options.steps) };
        let mut run = setup.start(model, adamw, training)?; // with --resume from a checkpoint
        while run.next_step()?.is_some() {
            let gradients = run.gradients(|pass, place| -> Result<(), Error> {
                // Your batch goes here. The number is another one on each rank and in each step.
                let (x, target) = batch(1 + options.run.number_of(place))?;
                let pass = Pass::new(pass)?;
                let mean = loss(&pass, &x, &target)?;
                pass.backward(&mean, 16).map(drop) // a mean of 16 items
            })?;
            run.update(|model, adamw| {
                adamw.set_learning_rate(rate.at(model.applied_steps()));
                adamw.step(model, gradients.clip(1.0))
            })?;
            run.evaluate(|model, _| -> Result<f64, Error> {
                let (x, target) = held_out;
                let mut evaluation = model.evaluation()?;
                let pass = Pass::new(evaluation.batch()?)?;
                let mean = loss(&pass, x, target)?.to_scalar::<f32>()?;
                pass.finish()?;
                Ok(evaluation.mean(16.0 * f64::from(mean), 16)?)
            })?;
        }
        run.finish()
    })
}

fn spec() -> ModelSpec {
    let hidden = Unit::new("hidden").param(Param::new("w1", [32, 4])).param(Param::new("b1", [32]));
    ModelSpec::new().unit(hidden).unit(Unit::new("output").param(Param::new("w2", [1, 32])))
}

fn loss(units: &dyn Units, x: &Tensor, target: &Tensor) -> candle_core::Result<Tensor> {
    let x = units.unit("hidden", x, |p, x| {
        x.matmul(&p.get("w1")?.t()?)?.broadcast_add(&p.get("b1")?)?.relu()
    })?;
    let y = units.unit("output", &x, |p, x| x.matmul(&p.get("w2")?.t()?))?;
    (units.output(&y)? - target)?.sqr()?.mean_all()
}

/// The initial values of a parameter, row-major.
fn initial(param: &Param) -> Vec<f32> {
    let seed = param.name.bytes().map(usize::from).sum::<usize>();
    (0..param.numel()).map(|at| ((at * 7 + seed) as f32).sin() * 0.3).collect()
}

/// Sixteen rows of four numbers, and the sum of each row as its target.
fn batch(number: u64) -> candle_core::Result<(Tensor, Tensor)> {
    let x: Vec<f64> = (0..64).map(|at| ((number * 64 + at) as f64 * 12.9898).sin()).collect();
    let x = Tensor::from_vec(x, (16, 4), &Device::Cpu)?.to_dtype(candle_core::DType::F32)?;
    let target = x.sum_keepdim(1)?;
    Ok((x, target))
}
