//! Moving averages of this rank's trainable parameters, which an update moves on while it has the parameters in the cache.

use std::fmt::Write as _;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate, PieceOfStep, Stream};
use hsdp_kernels::{MomentumKind, SgdStep, sgd};
use hsdp_sharding::{ParamId, Piece, Role, UnitId};

use crate::error::Error;
use crate::model::updates::MovingAverage;
use crate::optimizer::options::check_number;
use crate::optimizer::pieces::trained_pieces;
use crate::options::allowed::Allowed;
use crate::persist::problem::Problem;
use crate::persist::saved::{AVERAGE, SavedState};
use crate::state::context::{Context, ErrorSite};
use crate::state::shard::Shard;
use crate::state::store::Store;

/// An exponential moving average, f32, in the layout of the trained part of each shard.
#[derive(Debug)]
pub(crate) struct Average {
    decay: f64,
    /// By unit.
    values: Vec<Store>,
}

impl Average {
    /// The name of its state in checkpoints, and in the lines that ranks compare.
    pub(crate) const KIND: &'static str = AVERAGE;

    /// Zeros, to be filled.
    fn zeros(site: ErrorSite<'_>, decay: f64) -> Result<Self, Error> {
        check_number(&Self::KIND, "decay", decay, Allowed::Fraction)?;
        check_frozen(site.context)?;
        let layouts = site.context.plan.layouts().iter();
        let lens = layouts.map(|layout| layout.trainable().shard_len);
        Ok(Self { decay, values: Store::zeros(&site, lens)? })
    }

    /// An average that begins as a copy of the parameters.
    ///
    /// # Errors
    /// Errors of [`Ema::new`](crate::Ema::new).
    pub(crate) fn copy_of(context: &Context, shards: &[Shard], decay: f64) -> Result<Self, Error> {
        let mut average = Self::zeros(context.site("Ema::new", 0), decay)?;
        average.fill(context, |(unit, piece), into| {
            shards[unit.index()].copy_to(context, piece.shard_start, into)
        })?;
        Ok(average)
    }

    /// The average in a checkpoint, which this rank reads in its own parts. `shards` are those of
    /// the model before the load.
    pub(crate) fn saved(
        context: &Context,
        (decay, step): (f64, u64),
        saved: &SavedState<'_>,
        shards: &[Shard],
    ) -> Result<Self, Problem> {
        let mut average = Self::zeros(context.site("loading", step), decay)?;
        average.fill(context, |(unit, piece), into| {
            let parameter = ParamId { unit, index: piece.param };
            if saved.takes_state(parameter) {
                return saved.read(Self::KIND, parameter, piece.param_start, into);
            }
            // It begins as the parameter, as the model has it after the load.
            let own =
                |into: &mut [f32]| shards[unit.index()].copy_to(context, piece.shard_start, into);
            saved.read_parameter(parameter, piece.param_start, own, into)
        })?;
        Ok(average)
    }

    fn fill<E: From<Error>>(
        &mut self,
        context: &Context,
        mut read: impl FnMut((UnitId, Piece), &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let site = context.site("loading", 0);
        for (unit, store) in context.plan.spec().unit_ids().zip(&mut self.values) {
            store.fill(&site, |values| {
                trained_pieces(context, unit)
                    .try_for_each(|piece| read((unit, piece), &mut values[piece.shard_range()]))
            })?;
        }
        Ok(())
    }

    pub(crate) fn decay(&self) -> f64 {
        self.decay
    }

    /// `average += (1 - decay) * (parameter - average)` as a step of SGD on the average: its gradient is `average - parameter`. The
    /// kernel rounds the rate to f32 once.
    fn step(&self) -> SgdStep {
        SgdStep {
            learning_rate: 1.0 - self.decay,
            momentum: 0.0,
            kind: MomentumKind::Classic,
            weight_decay: 1.0,
            clip: -1.0,
        }
    }

    /// Copies elements of a parameter that this rank has, from the `start`-th on, until `into` is full. `false` if the parameter is
    /// frozen.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_to(
        &self,
        context: &Context,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let ParamId { unit, index } = parameter;
        let mut pieces = trained_pieces(context, unit);
        let Some(piece) = pieces.find(|piece| piece.param == index) else { return Ok(false) };
        let from = piece.shard_start + start - piece.param_start;
        self.values[unit.index()].copy_to(&context.site("saving", 0), from, into)?;
        Ok(true)
    }

    /// Copies all averages of a unit over the parameters of this rank's shard.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_over(
        &self,
        context: &Context,
        unit: UnitId,
        shard: &mut [f32],
    ) -> Result<(), Error> {
        let site = context.site("saving", 0);
        trained_pieces(context, unit).try_for_each(|piece| {
            let into = &mut shard[piece.shard_range()];
            self.values[unit.index()].copy_to(&site, piece.shard_start, into)
        })
    }
}

impl MovingAverage for Average {
    fn write(&self, lines: &mut String) {
        writeln!(lines, "{} decay {:?}", Self::KIND, self.decay).expect("a string takes any text");
    }

    fn update(&mut self, unit: UnitId, piece: Piece, parameters: &[f32]) {
        let step = self.step();
        let average = &mut self.values[unit.index()].here_mut()[piece.shard_range()];
        sgd(&step, average, parameters, None);
    }

    fn update_on_device(
        &mut self,
        unit: UnitId,
        stream: &Stream,
        pieces: &[Piece],
        master: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let piece = |piece: &Piece| {
            let range = piece.shard_range();
            PieceOfStep { state: range.start, range, step: 1 }
        };
        let pieces: Vec<PieceOfStep> = pieces.iter().map(piece).collect();
        let step = self.step();
        let parameters = self.values[unit.index()].there_mut();
        let update = DeviceUpdate { parameters, rounded: None, gradient: master, divisor: 1.0 };
        stream.sgd(update, &pieces, &step, None)
    }
}

/// Refuses a unit with trainable and frozen parameters that is updated on a device: the kernel wants no more parameters than averages.
fn check_frozen(context: &Context) -> Result<(), Error> {
    let mut units = context.plan.spec().units().iter().zip(context.plan.layouts());
    let mixed = units.find(|(_, layout)| {
        let trained = layout.trainable().shard_len;
        trained > 0 && trained < layout.shard_len()
    });
    match mixed.filter(|_| context.updates_on_device()) {
        None => Ok(()),
        Some((unit, _)) => {
            let frozen = unit.params.iter().find(|param| param.role == Role::Frozen);
            let frozen = frozen.map_or("", |param| &*param.name);
            let what = format!(
                "{}: parameter `{frozen}` is frozen, and others of unit `{}` are not: on a device an average needs units of one kind; make \
                 a unit of the frozen parameters, or place the model on the host",
                Average::KIND,
                unit.name
            );
            Err(Error::Options { what })
        }
    }
}
