//! The evaluation of a model on data that it is not trained on.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::error::Error;
use crate::step::engine::{Engine, OpenedEvaluation};
use crate::step::{Pass, PassHandle};

/// Forwards without a backward, between steps: each unit is gathered once a batch, nothing is
/// reduced, no parameter changes.
///
/// Ranks may have different numbers of batches. A rank that has no batch left calls
/// [`mean`](Self::mean), and gathers along with the others until all have come to it.
///
/// All ranks make the evaluations of a model in one order: nothing else tells two of them apart.
///
/// A drop before the mean, or after an error, tells the other ranks, as that of a
/// [`Step`](crate::Step) does.
///
/// ```
/// use hsdp::prelude::*;
///
/// let means = hsdp::launch(2, WorldOptions::default(), |world| -> Result<f64, hsdp::Error> {
///     let spec = ModelSpec::new().unit(Unit::new("linear").param(Param::new("w", [4])));
///     let rank = world.rank().index();
///     let options = ModelOptions::on(Mesh::new(1, 2)?);
///     let mut model = ShardedModel::new(world, spec, options, |_| vec![0.5; 4])?;
///     let linear = model.plan().spec().unit_ids().next().expect("one unit");
///
///     let mut evaluation = model.evaluation()?;
///     let (mut sum, batches) = (0.0, 1 + rank); // rank 1 has two
///     for _ in 0..batches {
///         let mut pass = evaluation.batch()?;
///         let full = pass.unshard(linear)?;
///         sum += full.as_f32(0).expect("an f32 model").iter().map(|w| f64::from(*w)).sum::<f64>();
///         drop(full);
///         pass.finish()?;
///     }
///     evaluation.mean(sum, batches as u64)
/// });
/// for mean in means {
///     assert_eq!(mean?, 2.0);
/// }
/// # Ok::<(), hsdp::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "an evaluation that is dropped before its mean is aborted on all ranks"]
pub struct Evaluation<'model> {
    engine: Arc<Engine>,
    opened: OpenedEvaluation,
    model: PhantomData<&'model mut ()>,
}

impl Evaluation<'_> {
    pub(crate) fn new(engine: Arc<Engine>, opened: OpenedEvaluation) -> Self {
        Self { engine, opened, model: PhantomData }
    }

    /// Begins this rank's next batch. [`Pass::unshard`] gathers a unit, [`Pass::finish`] ends the
    /// batch; [`Pass::loss`] and [`Pass::reduce`] are refused. The units follow the order of
    /// training; before the first step, that of the batch itself, if all ranks have the same.
    ///
    /// Collective over the world, with the `batch` or the first [`mean`](Self::mean) of all other
    /// ranks: the ranks exchange whether they have another batch.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the last batch was not finished, or after a mean; [`Error::Comm`] if
    /// the exchange fails.
    pub fn batch(&mut self) -> Result<Pass<'_>, Error> {
        let token = self.engine.begin_batch(self.opened.id)?;
        Ok(Pass::of(PassHandle::new(&self.engine, token)))
    }

    /// Returns the mean over the items of all batches of all ranks: the sum of all `sum`s, in rank
    /// order, over the sum of all `items`. The same on all ranks, and not a mean of means. Further
    /// means, of other quantities, may follow; batches may not.
    ///
    /// Collective over the world. The first mean takes part in the batches that other ranks still
    /// have.
    ///
    /// # Errors
    /// [`DataError::EmptyEvaluation`](crate::DataError::EmptyEvaluation) on all ranks if there are
    /// no items; [`Error::Misuse`] if a batch was not finished; [`Error::Comm`] if an exchange or a
    /// gather fails.
    pub fn mean(&mut self, sum: f64, items: u64) -> Result<f64, Error> {
        self.engine.evaluated_mean(self.opened.id, sum, items)
    }
}

impl Drop for Evaluation<'_> {
    fn drop(&mut self) {
        self.engine.end_evaluation(self.opened);
    }
}
