//! Trains two towers to find the views of the same point among all ranks' pairs.
//!
//! ```text
//! cargo run --release --example contrastive
//! cargo run --release --example contrastive -- --ranks 8 --dtype f64
//! ```
//!
//! The loss of a rank's pairs needs the embeddings of all ranks' pairs: they are gathered, and
//! gradients flow back through the gather. No wrapper is involved: by their types, parameters are
//! Replicate and their gradients Partial.

use std::process::ExitCode;

use candle_core::{D, DType, Device, Tensor, Var};
use clap::{Parser, ValueEnum};
use hsdp::Channel;
use hsdp::dist::{Invariant, OnShard, Replicate, Sum, Varying};
use hsdp::prelude::*;
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _, Tape, gradient_of};
use hsdp_train::memory::{Limit, Need, product};
use hsdp_train::number::count;
use hsdp_train::{Failure, MAX_STEPS, Warnings, command_line, threads};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Maximum batch and width: their products fit 64 bits. The memory of the process allows less.
const MAX: usize = 1 << 24;
/// Number of coordinates of a point.
const LATENT: usize = 6;
/// Number of elements of a view.
const VIEW: usize = 24;
/// Scale of the noise on an element of a view, which is about 1.
const NOISE: f64 = 0.25;
/// Number of elements of an embedding.
const EMBEDDING: usize = 16;
/// Similarities are divided by this before they are compared.
pub(crate) const TEMPERATURE: f64 = 0.1;

const LEARNING_RATE: f64 = 0.01;
const MOMENTUM: f64 = 0.9;

/// Streams of random numbers. Batches have the streams from `BATCHES` on.
const MAPS: u64 = 0;
const PARAMETERS: u64 = 1;
const BATCHES: u64 = 2;

/// Numbers of tensors that a step holds at its peak, measured with one large size each: tensors of
/// the size of a hidden layer, of all similarities in one direction, and of the parameters.
const HIDDEN: usize = 20;
const LOGITS: usize = 18;
const COPIES: usize = 6;

/// Trains two towers by a contrastive loss, on ranks that are threads
#[derive(Clone, Debug, Parser)]
#[command(name = "contrastive", version)]
pub(crate) struct Options {
    /// Number of ranks, at most 64; each has its own part of a batch
    #[arg(
        long, value_name = "COUNT", default_value_t = 4,
        value_parser = count::<1, { usize::MAX }>
    )]
    pub(crate) ranks: usize,

    /// Number of steps, at most 1000000000; each step updates the parameters once
    #[arg(long, value_name = "COUNT", default_value_t = 300, value_parser = count::<1, MAX_STEPS>)]
    pub(crate) steps: usize,

    /// Number of pairs in a batch, of all ranks together, as far as memory allows; a multiple of
    /// --ranks
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = count::<1, MAX>)]
    pub(crate) batch: usize,

    /// Number of elements of the towers' hidden layer, as far as memory allows
    #[arg(long, value_name = "SIZE", default_value_t = 64, value_parser = count::<1, MAX>)]
    pub(crate) width: usize,

    /// Seed of the data and of the initial parameters
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Dtype of the data, the parameters and the gradients
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub(crate) dtype: Float,
}

/// A dtype to train in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Float {
    F32,
    F64,
}

/// A value that all ranks hold, and each uses in its own way. The ranks are the shard axis; the
/// replicate axis has size 1.
type Copied = Dist<Invariant, Replicate>;

/// A value that differs between ranks.
type Own = Dist<Invariant, Varying>;

fn main() -> ExitCode {
    hsdp_train::program("contrastive", || {
        let options: Options = command_line::read()?;
        options.check(1)?;
        hsdp_train::prepare(options.ranks)?;
        let warnings = Warnings::of("contrastive");
        warnings.listen()?;
        let records = train(&options, &warnings)?;
        hsdp_train::print(report(&options, &records, warnings.count()))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Trains on as many threads as there are ranks. Returns the records of rank 0.
fn train(options: &Options, warnings: &Warnings) -> Result<Vec<Record>, Failure> {
    let bar = hsdp_train::bar(options.steps as u64, warnings);
    let records = threads::run(options.ranks, WorldOptions::default(), |world| {
        let is_first = world.rank().index() == 0;
        let mut parameters = Parameters::new(options)?;
        let mut records = Vec::new();
        for step in 0..options.steps {
            let record = train_step(options, &world, &mut parameters, step)?;
            if is_first {
                let Record { loss, accuracy, .. } = record;
                bar.set_message(format!("loss {loss:.3}  {:.1} % found", 100.0 * accuracy));
                bar.inc(1);
                records.push(record);
            }
        }
        Ok(records)
    })?;
    bar.finish();
    Ok(records.into_iter().flatten().collect())
}

/// The results of a step, before its update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) step: usize,
    /// Mean over all ranks' pairs, in both directions.
    pub(crate) loss: f64,
    /// Fraction of all views whose partner is the nearest of all ranks' views.
    accuracy: f64,
}

/// Makes one step of a rank. Collective.
pub(crate) fn train_step(
    options: &Options,
    world: &World,
    parameters: &mut Parameters,
    step: usize,
) -> Result<Record, Error> {
    let share = options.share();
    let start = world.rank().index() * share;
    let tape = Tape::of_group(world, world.world_group(Channel::User))?;
    let views: [Own; 2] = options.views(step, start, share)?.map(|view| tape.assume(view));
    let places: Own = tape.assume(partners(start, share)?);
    let copied = |var: &Var| -> Copied { tape.assume(var.as_tensor().clone()) };
    let [a, b, c, d] = &parameters.vars.each_ref().map(copied);

    let [one, other] = [tower(&views[0], [a, b])?, tower(&views[1], [c, d])?];
    let [there, found_there] = contrast(&one, &other, &places)?;
    let [back, found_back] = contrast(&other, &one, &places)?;
    let pairs = 2.0 * options.batch as f64;
    let loss = there.add(&back)?.scale(1.0 / pairs)?;
    let gradients = loss.to_partial(OnShard)?.backward()?;
    let gradient = |parameter: &Copied| -> Result<Tensor, Error> {
        let term = gradient_of(&gradients, parameter)?;
        Ok(term.all_reduce(OnShard, Sum)?.into_tensor().detach())
    };
    parameters.update([gradient(a)?, gradient(b)?, gradient(c)?, gradient(d)?])?;

    let whole = |value: &Own| -> Result<f64, Error> {
        let terms: Own = tape.without_gradients().assume(value.tensor().detach());
        let sum: Copied = terms.to_partial(OnShard)?.all_reduce(OnShard, Sum)?;
        Ok(sum.into_tensor().to_dtype(DType::F64)?.to_scalar()?)
    };
    let accuracy = whole(&found_there.add(&found_back)?)? / pairs;
    Ok(Record { step, loss: whole(&loss)?, accuracy })
}

/// Returns embeddings of length 1.
fn tower(view: &Own, [hidden, embed]: [&Copied; 2]) -> Result<Own, Error> {
    let y = view.matmul(hidden)?.gelu()?.matmul(embed)?;
    y.broadcast_div(&y.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)
}

/// Compares each of `mine` with those of all ranks, to find its partner. `places` has the partners'
/// indices. Returns the sum of the losses of this rank's pairs, and the number of those that find
/// their partner. Collective.
fn contrast(mine: &Own, others: &Own, places: &Own) -> Result<[Own; 2], Error> {
    let all: Copied = others.all_gather(OnShard)?;
    let logits = mine.matmul(&all.transpose(0, 1)?)?.scale(1.0 / TEMPERATURE)?;
    let loss = logits.log_softmax(1)?.gather_along(places, 1)?.sum_all()?.neg()?;
    let found = logits.zip(places, |logits, places| {
        let nearest = logits.argmax_keepdim(1)?.to_dtype(DType::I64)?;
        Ok(nearest.eq(places)?.to_dtype(DType::I64)?.sum_all()?)
    })?;
    Ok([loss, found])
}

/// Two matrices for each of two towers, and their velocities after the first update.
#[derive(Debug)]
pub(crate) struct Parameters {
    pub(crate) vars: [Var; 4],
    velocities: Option<[Tensor; 4]>,
}

impl Parameters {
    /// Makes the initial parameters, the same on all ranks.
    pub(crate) fn new(options: &Options) -> candle_core::Result<Self> {
        let mut number = numbers(options.seed, PARAMETERS);
        let mut parameter = |rows: usize, columns: usize| {
            let values = matrix([rows, columns], 1.0 / (rows as f64).sqrt(), &mut number)?;
            Var::from_tensor(&values.to_dtype(options.dtype.dtype())?)
        };
        let width = options.width;
        let vars = [
            parameter(VIEW, width)?,
            parameter(width, EMBEDDING)?,
            parameter(VIEW, width)?,
            parameter(width, EMBEDDING)?,
        ];
        Ok(Self { vars, velocities: None })
    }

    /// Makes one update by stochastic gradient descent with momentum.
    pub(crate) fn update(&mut self, gradients: [Tensor; 4]) -> candle_core::Result<()> {
        let mut velocities = gradients;
        if let Some(before) = self.velocities.take() {
            for (velocity, before) in velocities.iter_mut().zip(before) {
                *velocity = (&*velocity + (before * MOMENTUM)?)?;
            }
        }
        for (var, velocity) in self.vars.iter().zip(&velocities) {
            var.set(&(var.as_tensor().detach() - (velocity * LEARNING_RATE)?)?)?;
        }
        self.velocities = Some(velocities);
        Ok(())
    }
}

/// Returns random numbers of variance 1 that depend on the seed and the stream alone, not on the
/// number of ranks.
fn numbers(seed: u64, stream: u64) -> impl FnMut() -> f64 {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    move || random.random_range(-1.0..1.0) * 3.0_f64.sqrt()
}

/// Returns a matrix of random numbers times `scale`.
fn matrix(
    [rows, columns]: [usize; 2],
    scale: f64,
    number: &mut impl FnMut() -> f64,
) -> candle_core::Result<Tensor> {
    let values: Vec<f64> = (0..rows * columns).map(|_| number() * scale).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu)
}

/// Returns the index of each of these pairs' partners among all pairs: i64, `[len, 1]`.
pub(crate) fn partners(start: usize, len: usize) -> candle_core::Result<Tensor> {
    let places: Vec<i64> = (start..start + len).map(|place| place as i64).collect();
    Tensor::from_vec(places, (len, 1), &Device::Cpu)
}

impl Float {
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F64 => DType::F64,
        }
    }
}

impl Options {
    /// Checks what the options demand of each other, and of memory. All pairs are compared with all
    /// pairs in so many `places`.
    pub(crate) fn check(&self, places: usize) -> Result<(), Failure> {
        let Self { ranks, batch, width, steps, .. } = *self;
        threads::check(ranks, threads::IN_EXAMPLES).map_err(Failure::Input)?;
        if !batch.is_multiple_of(ranks) {
            let what = format!("a batch of {batch} pairs cannot be shared evenly by {ranks} ranks");
            return Err(Failure::Input(what));
        }
        if batch < 2 {
            let what = "a batch of 1 pair has no other pair to compare with: at least 2";
            return Err(Failure::input(what));
        }
        let layers = 2 * (VIEW + EMBEDDING);
        let size = self.dtype.dtype().size_in_bytes();
        // Each rank makes the whole batch of views.
        let views = product(&[ranks, batch, LATENT + 2 * VIEW, size_of::<f64>()]);
        let need = Need::default()
            .with("a record of each step", product(&[steps, size_of::<Record>()]))
            .with("the batch of each rank", views)
            .with("the hidden layers", product(&[batch, width, HIDDEN, size]))
            .with("the comparison of all pairs", product(&[places, batch, batch, LOGITS, size]))
            .with("the parameters of each rank", product(&[ranks, layers, width, COPIES, size]));
        Ok(need.check(Limit::of_process())?)
    }

    /// Returns the number of pairs of each rank.
    fn share(&self) -> usize {
        self.batch / self.ranks
    }

    /// Returns both views of some pairs of the batch of a step, `[len, VIEW]` each. Each pair shows
    /// one point of a latent space through two fixed maps, with noise.
    pub(crate) fn views(
        &self,
        step: usize,
        start: usize,
        len: usize,
    ) -> candle_core::Result<[Tensor; 2]> {
        let mut of_maps = numbers(self.seed, MAPS);
        let mut of_batch = numbers(self.seed, BATCHES + step as u64);
        let points = matrix([self.batch, LATENT], 1.0, &mut of_batch)?;
        let mut view = || {
            let scale = 1.0 / (LATENT as f64).sqrt();
            let seen = points.matmul(&matrix([LATENT, VIEW], scale, &mut of_maps)?)?.tanh()?;
            let noise = matrix([self.batch, VIEW], NOISE, &mut of_batch)?;
            (seen + noise)?.to_dtype(self.dtype.dtype())?.narrow(0, start, len)
        };
        Ok([view()?, view()?])
    }
}

/// Returns the means of each tenth of the steps, and the number of warnings if there were any.
fn report(options: &Options, records: &[Record], warnings: u64) -> String {
    let Options { ranks, batch, .. } = *options;
    let mut lines = vec![
        format!("{ranks} ranks with {} of {batch} pairs each", options.share()),
        format!("{:>12}  {:>8}  {:>8}", "steps", "loss", "found"),
    ];
    for part in records.chunks(records.len().div_ceil(10).max(1)) {
        let mean = |of: fn(&Record) -> f64| part.iter().map(of).sum::<f64>() / part.len() as f64;
        let steps = format!("{}-{}", part[0].step, part[0].step + part.len() - 1);
        let loss = mean(|record| record.loss);
        let accuracy = mean(|record| record.accuracy);
        lines.push(format!("{steps:>12}  {loss:>8.4}  {:>6.1} %", 100.0 * accuracy));
    }
    if warnings > 0 {
        lines.push(format!("{:>12}  {warnings:>8}", "warnings"));
    }
    lines.join("\n")
}
