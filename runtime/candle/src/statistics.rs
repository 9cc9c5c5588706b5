//! Sums of a batch over all ranks, in the forward and in the backward of a layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use hsdp::ModelSpec;
use hsdp_sharding::UnitId;
use parking_lot::Mutex;

use crate::unit::LiveUnit;

/// Sums the statistics of a batch norm over all ranks, as the unit that holds the layer
/// [declares](hsdp_sharding::Unit::batch_norm). On [`Plain`](crate::Plain) the sums are those of
/// the one batch.
#[derive(Clone, Debug)]
pub struct BatchStatistics(StatisticsSource);

#[derive(Clone, Debug)]
enum StatisticsSource {
    /// A run on one rank, which has the whole batch.
    Whole,
    /// A run of a unit that is not recomputed.
    Once { unit: Arc<LiveUnit>, index: usize },
    /// The first run of a recomputed unit, which records the sums.
    First { unit: Arc<LiveUnit>, index: usize, record: Arc<StatisticsRecord> },
    /// The second run, which has the sums of the first.
    Second(Arc<RecordedSums>),
}

/// Sums of the first run of a recomputed unit, in the order of its calls.
pub(crate) type StatisticsRecord = Mutex<Vec<Arc<RecordedSums>>>;

/// Statistics of a layer of a recomputed unit.
#[derive(Debug)]
pub(crate) struct RecordedSums {
    unit: Arc<LiveUnit>,
    index: usize,
    sums: Vec<f64>,
    /// Whether a gradient flows through the sums to the batch.
    reaches_batch: AtomicBool,
    has_gradient: AtomicBool,
}

impl RecordedSums {
    /// Makes the unit wait for the backward of the statistics.
    pub(crate) fn await_backward(&self) {
        self.unit.awaits_statistics(self.index, self.reaches_batch.load(Ordering::Relaxed));
    }

    /// Ends the wait if the second run's backward did not come to the statistics.
    pub(crate) fn end_backward(&self) -> Result<()> {
        match self.has_gradient.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Ok(self.unit.end_statistics()?),
        }
    }

    pub(crate) fn is(&self, unit: UnitId, index: usize) -> bool {
        (self.unit.id(), self.index) == (unit, index)
    }
}

impl BatchStatistics {
    /// Returns the statistics of a run that has the whole batch on one rank, for an own
    /// implementation of [`Parameters`](crate::Parameters).
    #[must_use]
    pub fn of_whole_batch() -> Self {
        Self(StatisticsSource::Whole)
    }

    pub(crate) fn once(unit: Arc<LiveUnit>, index: usize) -> Self {
        Self(StatisticsSource::Once { unit, index })
    }

    pub(crate) fn first(unit: Arc<LiveUnit>, index: usize, record: Arc<StatisticsRecord>) -> Self {
        Self(StatisticsSource::First { unit, index, record })
    }

    pub(crate) fn second(recorded: Arc<RecordedSums>) -> Self {
        Self(StatisticsSource::Second(recorded))
    }

    /// Sums `own` over all ranks in a forward: the number of values of a channel, the sum of each
    /// channel, and the sum of the squares of each channel, `[2 channels + 1]`. The second run of a
    /// recomputed unit gets the sums of its first.
    ///
    /// Collective over the world: all ranks issue the sums of a unit in the order of its
    /// declaration, and ranks without data take part with zeros.
    ///
    /// # Errors
    /// The errors of [`PassHandle::statistics`](hsdp::PassHandle::statistics).
    pub fn forward(&self, own: Vec<f64>) -> Result<Vec<f64>> {
        match &self.0 {
            StatisticsSource::Whole => Ok(own),
            StatisticsSource::Once { unit, index } => Ok(unit.sum_forward(*index, own)?),
            StatisticsSource::First { unit, index, record } => {
                let sums = unit.sum_forward(*index, own)?;
                record.lock().push(Arc::new(RecordedSums {
                    unit: Arc::clone(unit),
                    index: *index,
                    sums: sums.clone(),
                    reaches_batch: AtomicBool::new(false),
                    has_gradient: AtomicBool::new(false),
                }));
                Ok(sums)
            }
            StatisticsSource::Second(recorded) => Ok(recorded.sums.clone()),
        }
    }

    /// Announces that the graph has a backward which calls [`backward`](Self::backward). The
    /// gradients of the unit are complete after that call. `batch` is the tensor that the sums are
    /// computed from. If candle tracks it and it has elements, the loss of this rank must depend on
    /// the layer, or the backward of the pass fails with
    /// [`LostGradients::Unreached`](crate::LostGradients::Unreached).
    pub fn await_backward(&self, batch: &Tensor) {
        // The sum of two tensors without elements is the first of them in candle, so the graph may
        // lack the other one. No gradient is lost by that.
        let reaches_batch = batch.track_op() && batch.elem_count() > 0;
        match &self.0 {
            StatisticsSource::Once { unit, index } => {
                unit.awaits_statistics(*index, reaches_batch);
            }
            StatisticsSource::First { unit, index, record } => {
                let record = record.lock();
                if let Some(sums) = record.iter().find(|sums| sums.is(unit.id(), *index)) {
                    sums.reaches_batch.store(reaches_batch, Ordering::Relaxed);
                }
            }
            StatisticsSource::Whole | StatisticsSource::Second(_) => {}
        }
    }

    /// Sums `own` over all ranks in a backward: two sums of each channel, `[2 channels]`. They are
    /// linear in the gradient of this rank's loss.
    ///
    /// Collective over the world, in the reverse order of the forward.
    ///
    /// # Errors
    /// The errors of [`PassHandle::statistics`](hsdp::PassHandle::statistics);
    /// [`LostGradients::OtherPass`](crate::LostGradients::OtherPass) and
    /// [`LostGradients::TensorBackward`](crate::LostGradients::TensorBackward) outside of the
    /// backward of the pass.
    pub fn backward(&self, own: Vec<f64>) -> Result<Vec<f64>> {
        match &self.0 {
            StatisticsSource::Whole => Ok(own),
            StatisticsSource::Once { unit, index }
            | StatisticsSource::First { unit, index, .. } => Ok(unit.sum_backward(*index, own)?),
            StatisticsSource::Second(recorded) => {
                recorded.has_gradient.store(true, Ordering::Relaxed);
                Ok(recorded.unit.sum_backward(recorded.index, own)?)
            }
        }
    }
}

/// Returns the unit that declares statistics under this name, and their index in the unit.
pub(crate) fn declared(spec: &ModelSpec, name: &str) -> Option<(UnitId, usize)> {
    spec.unit_ids().find_map(|unit| {
        let index = spec[unit].statistics.iter().position(|it| it.name == name)?;
        Some((unit, index))
    })
}
