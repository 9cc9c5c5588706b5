//! `verify contrastive`: the ranks of `contrastive`, and one rank that has the whole batch, in
//! plain candle.
//!
//! After each step the twin takes over the ranks' parameters. So differences do not grow from step
//! to step, except for those that the momentum keeps: a tenth of a gradient's at most, at this
//! learning rate.
//!
//! On one rank every op is the same, and so is every bit. On more ranks, a gradient is the sum of
//! the ranks' sums: it has the same terms, in another order. A sum of `n` terms is off by at most
//! `n` roundings of half an epsilon each, relative to the size of its terms. A number that goes
//! through several sums, of the forward and the backward, is off by as many times that. So numbers
//! may differ by `SUMS n epsilon` relative to the largest, where `n` is the length of the longest
//! sum.

#[path = "../../../../runtime/models/examples/contrastive.rs"]
#[expect(dead_code, reason = "the functions that only `main` calls")]
mod example;

use std::process::ExitCode;

use candle_core::{D, DType, Result, Tensor};
use candle_nn::ops;
use hsdp::WorldOptions;
use hsdp_train::{Failure, Warnings, threads};

use self::example::{Float, Parameters, Record, TEMPERATURE, partners, train_step};
use crate::NAME;

pub(crate) use self::example::Options;

/// Number of consecutive sums in a gradient: two matmuls, a norm and a softmax, in the forward and
/// in the backward.
const SUMS: f64 = 8.0;

/// Trains, compares each step, and prints the result.
pub(crate) fn run(options: &Options) -> std::result::Result<ExitCode, Failure> {
    options.check(2)?;
    hsdp_train::prepare(options.ranks)?;
    let warnings = Warnings::of(NAME);
    warnings.listen()?;
    let bar = hsdp_train::bar(options.steps as u64, &warnings);
    let compared = threads::run(options.ranks, WorldOptions::default(), |world| {
        let mut parameters = Parameters::new(options)?;
        let is_first = world.rank().index() == 0;
        let mut twin = is_first.then(|| Twin::new(options)).transpose()?;
        for step in 0..options.steps {
            let record = train_step(options, &world, &mut parameters, step)?;
            if let Some(twin) = &mut twin {
                twin.check(&record, &parameters)?;
                bar.inc(1);
            }
        }
        Ok(twin)
    })?;
    bar.finish();
    for twin in compared.into_iter().flatten() {
        hsdp_train::print(twin.verified())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One rank with the whole batch, and the result of the comparison so far.
#[derive(Debug)]
struct Twin<'a> {
    options: &'a Options,
    parameters: Parameters,
    /// Bound on differences, relative to the largest number.
    bound: f64,
    /// Largest difference so far.
    apart: f64,
}

impl<'a> Twin<'a> {
    fn new(options: &'a Options) -> Result<Self> {
        let longest = options.batch.max(options.width) as f64;
        let epsilon = match options.dtype {
            Float::F32 => f64::from(f32::EPSILON),
            Float::F64 => f64::EPSILON,
        };
        let bound = if options.ranks == 1 { 0.0 } else { SUMS * longest * epsilon };
        Ok(Self { options, parameters: Parameters::new(options)?, bound, apart: 0.0 })
    }

    /// Makes a step, and compares its loss and the parameters after it with those of the ranks.
    fn check(&mut self, record: &Record, ranks: &Parameters) -> std::result::Result<(), Failure> {
        let loss = numbers(&self.step(record.step)?)?;
        self.compare("loss", record.step, [&[record.loss], &loss])?;
        for (number, theirs) in ranks.vars.iter().enumerate() {
            let [got, want] = [numbers(theirs)?, numbers(&self.parameters.vars[number])?];
            self.compare(&format!("parameter {number}"), record.step, [&got, &want])?;
            self.parameters.vars[number].set(&theirs.as_tensor().detach())?;
        }
        Ok(())
    }

    /// Makes one update, and returns the loss before it.
    fn step(&mut self, step: usize) -> Result<Tensor> {
        let batch = self.options.batch;
        let [a, b, c, d] = self.parameters.vars.each_ref().map(|var| var.as_tensor());
        let [one, other] = self.options.views(step, 0, batch)?;
        let [one, other] = [tower(&one, [a, b])?, tower(&other, [c, d])?];
        let places = partners(0, batch)?;
        let both = (contrast(&one, &other, &places)? + contrast(&other, &one, &places)?)?;
        let loss = (both * (1.0 / (2.0 * batch as f64)))?;
        let gradients = loss.backward()?;
        let of = |parameter: &Tensor| {
            gradients.get(parameter).map_or_else(|| parameter.zeros_like(), |g| Ok(g.clone()))
        };
        let gradients = [of(a)?, of(b)?, of(c)?, of(d)?];
        self.parameters.update(gradients)?;
        Ok(loss.detach())
    }

    fn compare(
        &mut self,
        what: &str,
        step: usize,
        [got, want]: [&[f64]; 2],
    ) -> std::result::Result<(), Failure> {
        let largest = want.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        for (got, want) in got.iter().zip(want) {
            let apart = if got == want { 0.0 } else { (got - want).abs() / largest };
            if apart.is_nan() || apart > self.bound {
                let ranks = self.options.ranks;
                let bound = self.bound;
                return Err(Failure::Disagreement(format!(
                    "step {step}: {what} is {got:e} on {ranks} ranks and {want:e} on one rank: the \
                     difference is {apart:.1e} of the largest number, rounding explains up to \
                     {bound:.1e}"
                )));
            }
            self.apart = self.apart.max(apart);
        }
        Ok(())
    }

    fn verified(&self) -> String {
        let Self { options, bound, apart, .. } = self;
        let what = format!("losses and parameters of {} steps", options.steps);
        if options.ranks == 1 {
            return format!("{what} bit-identical to plain candle's");
        }
        format!(
            "{what} within {apart:.1e} of plain candle's with the whole batch; rounding explains \
             up to {bound:.1e}"
        )
    }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn tower(view: &Tensor, [hidden, embed]: [&Tensor; 2]) -> Result<Tensor> {
    let y = view.matmul(hidden)?.gelu()?.matmul(embed)?;
    y.broadcast_div(&y.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)
}

fn contrast(mine: &Tensor, others: &Tensor, places: &Tensor) -> Result<Tensor> {
    let logits = (mine.matmul(&others.t()?)? * (1.0 / TEMPERATURE))?;
    ops::log_softmax(&logits, 1)?.gather(places, 1)?.sum_all()?.neg()
}
