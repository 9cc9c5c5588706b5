//! The state that the updates of a model share, and that no step needs.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::{Arc, Weak};

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, DeviceUpdate, PieceOfStep, Stream};
use hsdp_kernels::memory::Category;
use hsdp_kernels::{MomentumKind, SgdStep, UPDATE_BLOCK, sgd, squared_distance, squared_norm};
use hsdp_sharding::{BufferId, ModelSpec, ParamId, Piece, Role, UnitId};
use parking_lot::Mutex;

use crate::error::Error;
use crate::options::allowed::Allowed;
use crate::state::buffers::ModelBuffers;
use crate::state::context::{Context, ErrorSite};
use crate::state::shard::Shard;
use crate::state::store::{LocatedF32, zeros_in};

/// The averages that updates move on, and the distance of the last update.
#[derive(Debug, Default)]
pub(crate) struct Updates {
    pub(crate) averages: Averages,
    /// How far the last update has moved this rank's parameters, if it was measured.
    pub(crate) moved: Option<Moved>,
}

/// The averages of a model.
#[derive(Debug, Default)]
pub(crate) struct Averages {
    /// Averages that an owner may still have, in the order in which they were made.
    all: Vec<Weak<Mutex<Average>>>,
    /// Number of the last average that a program has made.
    last: u32,
}

impl Averages {
    pub(crate) fn add(&mut self, average: &Arc<Mutex<Average>>) {
        self.all.push(Arc::downgrade(average));
    }

    /// Returns the number of a new average, from 1 in the order of creation. It does not depend on
    /// the averages that this rank has dropped, so it is equal on all ranks.
    pub(crate) fn next_number(&mut self) -> u32 {
        self.last = self.last.saturating_add(1);
        self.last
    }

    /// Returns the averages that an owner still has.
    pub(crate) fn living(&mut self) -> Vec<Arc<Mutex<Average>>> {
        self.all.retain(|average| average.strong_count() > 0);
        self.all.iter().filter_map(Weak::upgrade).collect()
    }
}

/// An exponential moving average, f32: of the elements that this rank updates in each shard, and of
/// the buffers.
#[derive(Debug)]
pub(crate) struct Average {
    decay: f64,
    /// The averages of each unit.
    values: Vec<LocatedF32>,
    /// The element of each unit's shard with which they begin.
    firsts: Vec<usize>,
    /// The averages of the buffers, whole on this rank, one after the other in declared order.
    buffers: Vec<f32>,
}

impl Average {
    /// The name of its state in checkpoints, and in the lines that ranks compare.
    pub(crate) const KIND: &'static str = "ema";

    /// Makes an average of zeros.
    ///
    /// # Errors
    /// Errors of [`Ema::new`](crate::Ema::new).
    pub(crate) fn zeros(site: ErrorSite<'_>, decay: f64) -> Result<Self, Error> {
        Allowed::Fraction.check(&Self::KIND, "decay", decay)?;
        check_frozen(site.context)?;
        let units = site.context.plan.spec().unit_ids();
        let updated: Vec<_> = units.map(|unit| site.context.updated(unit)).collect();
        let values = LocatedF32::zeros(site, updated.iter().map(Range::len))?;
        let firsts = updated.into_iter().map(|range| range.start).collect();
        let numel = site.context.plan.spec().buffers().map(|(_, buffer)| buffer.numel()).sum();
        let buffers = zeros_in(Category::Buffers, numel)?;
        Ok(Self { decay, values, firsts, buffers })
    }

    /// Makes an average that begins as a copy of the parameters and of the buffers.
    ///
    /// # Errors
    /// Errors of [`Ema::new`](crate::Ema::new).
    pub(crate) fn copy_of(
        site: ErrorSite<'_>,
        shards: &[Shard],
        buffers: &ModelBuffers,
        decay: f64,
    ) -> Result<Self, Error> {
        let mut average = Self::zeros(site, decay)?;
        average.buffers.copy_from_slice(buffers.all_committed());
        average.fill(site, |unit, piece, into| {
            shards[unit.index()].copy_to(site, piece.shard_start, into)
        })?;
        Ok(average)
    }

    /// Fills the average: `read` gets the unit, the piece of this rank's shard, and its elements.
    pub(crate) fn fill<E: From<Error>>(
        &mut self,
        site: ErrorSite<'_>,
        mut read: impl FnMut(UnitId, Piece, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let context = site.context;
        let stores = self.values.iter_mut().zip(&self.firsts);
        for (unit, (store, first)) in context.plan.spec().unit_ids().zip(stores) {
            store.fill(site, |values| {
                let mut pieces = context.updated_pieces(unit);
                pieces.try_for_each(|piece| {
                    let into = &mut values[piece.shard_start - first..][..piece.len];
                    read(unit, piece, into)
                })
            })?;
        }
        Ok(())
    }

    /// Fills the averages of the buffers: `read` gets a buffer and its elements.
    pub(crate) fn fill_buffers<E>(
        &mut self,
        spec: &ModelSpec,
        mut read: impl FnMut(BufferId, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = &mut *self.buffers;
        for (id, buffer) in spec.buffers() {
            let (own, behind) = rest.split_at_mut(buffer.numel());
            read(id, own)?;
            rest = behind;
        }
        Ok(())
    }

    /// Returns the average of a buffer.
    pub(crate) fn buffer(&self, spec: &ModelSpec, buffer: BufferId) -> &[f32] {
        let before = spec.buffers().take_while(|(id, _)| *id < buffer);
        let start: usize = before.map(|(_, buffer)| buffer.numel()).sum();
        &self.buffers[start..][..spec[buffer].numel()]
    }

    /// Returns the averages of all buffers, one after the other in declared order.
    pub(crate) fn buffers(&self) -> &[f32] {
        &self.buffers
    }

    pub(crate) fn decay(&self) -> f64 {
        self.decay
    }

    /// Returns `average += (1 - decay) * (parameter - average)` as a step of SGD on the average,
    /// whose gradient is `average - parameter`. The kernel rounds the rate to f32 once.
    fn step(&self) -> SgdStep {
        SgdStep {
            learning_rate: 1.0 - self.decay,
            momentum: 0.0,
            kind: MomentumKind::Classic,
            weight_decay: 1.0,
            clip: -1.0,
        }
    }

    /// Copies elements of a parameter that this rank has, from the `start`-th on, until `into` is
    /// full. Returns `false` if the parameter is frozen.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_to(
        &self,
        site: ErrorSite<'_>,
        parameter: ParamId,
        start: usize,
        into: &mut [f32],
    ) -> Result<bool, Error> {
        let ParamId { unit, index } = parameter;
        let mut pieces = site.context.updated_pieces(unit);
        let Some(piece) = pieces.find(|piece| piece.param == index) else { return Ok(false) };
        let from = piece.shard_start + start - piece.param_start - self.firsts[unit.index()];
        self.values[unit.index()].copy_to(site, from, into)?;
        Ok(true)
    }

    /// Copies the averages of a unit over the parameters of this rank's shard.
    ///
    /// # Errors
    /// Errors of a device.
    pub(crate) fn copy_over(
        &self,
        site: ErrorSite<'_>,
        unit: UnitId,
        shard: &mut [f32],
    ) -> Result<(), Error> {
        let first = self.firsts[unit.index()];
        site.context.updated_pieces(unit).try_for_each(|piece| {
            let into = &mut shard[piece.shard_range()];
            self.values[unit.index()].copy_to(site, piece.shard_start - first, into)
        })
    }

    /// Writes the line that ranks compare.
    pub(crate) fn write(&self, lines: &mut String) {
        writeln!(lines, "{} decay {:?}", Self::KIND, self.decay).expect("a string takes any text");
    }

    /// Updates elements on the host, from the parameters after an update.
    pub(crate) fn update(&mut self, unit: UnitId, piece: Piece, parameters: &[f32]) {
        let step = self.step();
        let start = piece.shard_start - self.firsts[unit.index()];
        let average = &mut self.values[unit.index()].here_mut()[start..start + piece.len];
        sgd(&step, average, parameters, None);
    }

    /// Updates the averages of the buffers, which lie on the host, from the values after a step.
    pub(crate) fn update_buffers(&mut self, values: &[f32]) {
        let step = self.step();
        sgd(&step, &mut self.buffers, values, None);
    }

    /// Updates pieces of a unit on a device, whose masters begin with an element of the shard.
    /// Waits for nothing.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn update_on_device(
        &mut self,
        unit: UnitId,
        stream: &Stream,
        pieces: &[Piece],
        master: &DeviceBuffer,
        master_first: usize,
    ) -> Result<(), CudaError> {
        let first = self.firsts[unit.index()];
        let piece = |piece: &Piece| {
            let range = piece.shard_range();
            PieceOfStep { state: range.start - first, range, step: 1 }
        };
        let pieces: Vec<PieceOfStep> = pieces.iter().map(piece).collect();
        let step = self.step();
        let parameters = self.values[unit.index()].there_mut();
        let update = DeviceUpdate {
            parameters,
            first,
            rounded: None,
            gradient: master,
            gradient_first: master_first,
            divisor: 1.0,
        };
        stream.sgd(update, &pieces, &step, None)
    }
}

/// Refuses a unit with trainable and frozen parameters that is updated on a device, where the
/// kernel needs an average for each parameter.
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
                "{}: parameter `{frozen}` is frozen, and others of unit `{}` are not: on a device \
                 an average needs units of one kind; make a unit of the frozen parameters, or \
                 place the model on the host",
                Average::KIND,
                unit.name
            );
            Err(Error::Options { what })
        }
    }
}

/// The squares of the elements in this rank's slices before an update and of their changes, by
/// parameter.
#[derive(Clone, Debug)]
pub(crate) struct Moved {
    /// Two sums of squares for each parameter of the model: before the update, and of the changes.
    pub(super) squares: Vec<f64>,
}

impl Moved {
    pub(crate) fn new(context: &Context) -> Self {
        Self { squares: vec![0.0; 2 * context.parameters()] }
    }

    /// Updates elements of a parameter, at most a [block](UPDATE_BLOCK), and adds the squares of
    /// their changes.
    pub(crate) fn measure(
        &mut self,
        parameter: usize,
        elements: &mut [f32],
        update: impl FnOnce(&mut [f32]),
    ) {
        let mut on_stack = [0.0; UPDATE_BLOCK];
        let before = &mut on_stack[..elements.len()];
        before.copy_from_slice(elements);
        update(elements);
        self.squares[2 * parameter] += squared_norm(before);
        self.squares[2 * parameter + 1] += squared_distance(elements, before);
    }
}
