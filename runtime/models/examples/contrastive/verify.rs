//! Compares the ranks' results with those of one rank that has the whole batch.
//!
//! After each step the twin takes over the ranks' parameters. So differences do not grow from step to step, except for those
//! that the momentum keeps: a tenth of a gradient's at most, at this learning rate.
//!
//! On one rank every op is the same, and so is every bit. On more ranks, a gradient is the sum of the ranks' sums: it has the
//! same terms, in another order. A sum of `n` terms is off by at most `n` roundings of half an epsilon each, relative to the
//! size of its terms. A number that goes through several sums, of the forward and the backward, is off by as many times that.
//! So numbers may differ by `SUMS n epsilon` relative to the largest, where `n` is the length of the longest sum.

use candle_core::{DType, Tensor};

use super::failure::TrainError;
use super::model::Parameters;
use super::options::Options;
use super::report::Record;
use super::twin::Twin;

/// The number of consecutive sums in a gradient: two matmuls, a norm and a softmax, in the forward and in the backward.
const SUMS: f64 = 8.0;

/// The largest difference between the two, relative to the largest number, and the bound on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verified {
    pub(crate) apart: f64,
    pub(crate) bound: f64,
}

/// A twin, and the result so far.
#[derive(Debug)]
pub(crate) struct Verifier {
    options: Options,
    twin: Twin,
    verified: Verified,
}

impl Verifier {
    pub(crate) fn new(options: &Options) -> Result<Self, TrainError> {
        let longest = options.batch.max(options.width) as f64;
        let bound = if options.ranks == 1 { 0.0 } else { SUMS * longest * options.dtype.epsilon() };
        let (twin, verified) = (Twin::new(options)?, Verified { apart: 0.0, bound });
        Ok(Self { options: options.clone(), twin, verified })
    }

    /// Compares a step's loss, and the parameters after it.
    pub(crate) fn check(&mut self, record: &Record, ranks: &Parameters) -> Result<(), TrainError> {
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
    ) -> Result<(), TrainError> {
        let largest = want.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        for (got, want) in got.iter().zip(want) {
            let apart = if got == want { 0.0 } else { (got - want).abs() / largest };
            if apart.is_nan() || apart > self.verified.bound {
                let (ranks, bound) = (self.options.ranks, self.verified.bound);
                return Err(TrainError::Disagreement(format!(
                    "step {step}: {what} is {got:e} on {ranks} ranks and {want:e} on one rank: the difference is \
                     {apart:.1e} of the largest number, rounding explains up to {bound:.1e}"
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
