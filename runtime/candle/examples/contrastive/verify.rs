//! Whether the ranks do what one rank with the whole batch does.
//!
//! After each step the twin goes on from the ranks' parameters, so that differences do not grow from step to step, but for
//! what the momentum keeps: a tenth of a gradient's at most, at this learning rate.
//!
//! On one rank every op is the same, and so is every bit. On more, a gradient is the sum of the ranks' sums: of the same
//! terms, in another order. A sum of `n` terms is off by at most `n` roundings of half an epsilon each, of the size of
//! its terms; one that goes through several sums, the forward's and the backward's, by as many times that. So numbers may
//! differ by `SUMS n epsilon` in proportion to the largest, where `n` is the longest sum that there is.

use candle_core::{DType, Tensor};

use super::failure::Failure;
use super::model::Parameters;
use super::options::Options;
use super::report::Record;
use super::twin::Twin;

/// Sums, one after the other, that a gradient goes through: two matmuls, a norm and a softmax, there and back.
const SUMS: f64 = 8.0;

/// How far apart the two were at most, in proportion to the largest number, and how far they might have been.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verified {
    pub(crate) apart: f64,
    pub(crate) bound: f64,
}

/// A twin, and what was found so far.
#[derive(Debug)]
pub(crate) struct Verifier {
    options: Options,
    twin: Twin,
    verified: Verified,
}

impl Verifier {
    pub(crate) fn new(options: &Options) -> Result<Self, Failure> {
        let longest = options.batch.max(options.width) as f64;
        let bound = if options.ranks == 1 { 0.0 } else { SUMS * longest * options.dtype.epsilon() };
        let (twin, verified) = (Twin::new(options)?, Verified { apart: 0.0, bound });
        Ok(Self { options: options.clone(), twin, verified })
    }

    /// Compares a step's loss, and the parameters after it.
    pub(crate) fn check(&mut self, record: &Record, ranks: &Parameters) -> Result<(), Failure> {
        let loss = numbers(&self.twin.step(&self.options, record.step)?)?;
        self.compare("loss", record.step, [&[record.loss], &loss])?;
        for (number, parameter) in ranks.0.iter().enumerate() {
            let twins = &self.twin.parameters.0[number];
            let [got, want] = [numbers(parameter.as_tensor())?, numbers(twins.as_tensor())?];
            self.compare(&format!("parameter {number}"), record.step, [&got, &want])?;
            let twins = &self.twin.parameters.0[number];
            twins.set(&parameter.as_tensor().detach())?;
        }
        Ok(())
    }

    pub(crate) fn verified(self) -> Verified {
        self.verified
    }

    fn compare(
        &mut self,
        what: &str,
        step: usize,
        [got, want]: [&[f64]; 2],
    ) -> Result<(), Failure> {
        let largest = want.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        for (got, want) in got.iter().zip(want) {
            let apart = if got == want { 0.0 } else { (got - want).abs() / largest };
            if apart.is_nan() || apart > self.verified.bound {
                let (ranks, bound) = (self.options.ranks, self.verified.bound);
                return Err(Failure::Disagreement(format!(
                    "step {step}: a {what} is {got:e} on {ranks} ranks and {want:e} on one: {apart:.1e} apart, in \
                     proportion to the largest; {bound:.1e} is what roundings explain"
                )));
            }
            self.verified.apart = self.verified.apart.max(apart);
        }
        Ok(())
    }
}

fn numbers(tensor: &Tensor) -> candle_core::Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}
