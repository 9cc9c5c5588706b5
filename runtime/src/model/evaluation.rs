//! The evaluation of a model on data that it is not trained on.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::agree::agreement::EvaluationEnd;
use crate::error::Error;
use crate::step::engine::{Engine, OpenedEvaluation};
use crate::step::{Pass, PassHandle};

/// Forwards without a backward of their own, between steps: each unit is gathered once a batch,
/// nothing is reduced, no parameter changes. In an evaluation
/// [with a backward](crate::ShardedModel::evaluation_with_backward), units are gathered again for
/// the backward of another model.
///
/// Ranks may have different numbers of batches. A rank that has no batch left ends the evaluation
/// by [`mean`](Self::mean), or by [`finish`](Self::finish) if no mean is wanted, and gathers along
/// with the others until all have come to the end. All ranks end an evaluation by the same call.
///
/// All ranks make the evaluations of a model in one order: nothing else tells two of them apart.
///
/// A drop before the end, or after an error, tells the other ranks, as that of a
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
#[must_use = "an evaluation that is dropped before its mean or its finish is aborted on all ranks"]
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
    /// Collective over the world, with the `batch`, the [`mean`](Self::mean) or the
    /// [`finish`](Self::finish) of all other ranks: the ranks exchange whether they have another
    /// batch.
    ///
    /// # Errors
    /// [`Error::Misuse`] if the last batch was not finished; [`Error::Disagreement`] on all ranks
    /// if the evaluation of another rank is [with a
    /// backward](crate::ShardedModel::evaluation_with_backward) and this one is not, or the other
    /// way round; [`Error::Comm`] if the exchange fails.
    pub fn batch(&mut self) -> Result<Pass<'_>, Error> {
        let token = self.engine.begin_batch(self.opened.id)?;
        Ok(Pass::of(PassHandle::new(&self.engine, token)))
    }

    /// Ends the evaluation, and returns the mean over the items of all batches of all ranks: the
    /// sum of all `sum`s, in rank order, over the sum of all `items`. The same on all ranks, and
    /// not a mean of means. [`World::sum`](crate::World::sum) adds up further quantities.
    ///
    /// Collective over the world, and takes part in the batches that other ranks still have.
    ///
    /// # Errors
    /// On all ranks: [`DataError::EmptyEvaluation`](crate::DataError::EmptyEvaluation) if there are
    /// no items, and [`Error::Disagreement`] if another rank has called [`finish`](Self::finish), or
    /// has begun an evaluation of another kind.
    /// [`Error::Misuse`] if a batch was not finished; [`Error::Comm`] if an exchange or a gather
    /// fails.
    pub fn mean(self, sum: f64, items: u64) -> Result<f64, Error> {
        let OpenedEvaluation { id, .. } = self.opened;
        self.engine.end_evaluation(id, EvaluationEnd::Mean { sum, items })?.mean(id.step)
    }

    /// Ends the evaluation without a mean, where its batches were for their outputs: logits,
    /// generated tokens, statistics.
    ///
    /// Collective over the world, and takes part in the batches that other ranks still have.
    ///
    /// # Errors
    /// [`Error::Disagreement`] on all ranks if another rank has called [`mean`](Self::mean), which
    /// would be without this rank's items, or has begun an evaluation of another kind.
    /// [`Error::Misuse`] if a batch was not finished;
    /// [`Error::Comm`] if an exchange or a gather fails.
    pub fn finish(self) -> Result<(), Error> {
        self.engine.end_evaluation(self.opened.id, EvaluationEnd::Finish).map(drop)
    }
}

impl Drop for Evaluation<'_> {
    fn drop(&mut self) {
        self.engine.abort_evaluation(self.opened);
    }
}
