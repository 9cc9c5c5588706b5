//! The state that the updates of a model share, and that no step needs.

use std::sync::{Arc, Weak};

use hsdp_kernels::cuda::{CudaError, DeviceBuffer, Stream};
use hsdp_kernels::{UPDATE_BLOCK, squared_distance, squared_norm};
use hsdp_sharding::{Piece, UnitId};
use parking_lot::Mutex;

use crate::state::context::Context;

/// The averages that updates move on, and the distance of the last update.
#[derive(Debug, Default)]
pub(crate) struct Updates {
    pub(crate) averages: Averages,
    /// How far the last update has moved this rank's parameters, if it was measured.
    pub(crate) moved: Option<Moved>,
}

/// A moving average of this rank's trainable parameters.
pub(crate) trait MovingAverage: Send {
    /// Writes the line that ranks compare.
    fn write(&self, lines: &mut String);

    /// Moves elements on, on the host.
    fn update(&mut self, unit: UnitId, piece: Piece, parameters: &[f32]);

    /// Moves pieces of a unit on, on a device. Waits for nothing.
    ///
    /// # Errors
    /// Errors of the device.
    fn update_on_device(
        &mut self,
        unit: UnitId,
        stream: &Stream,
        pieces: &[Piece],
        master: &DeviceBuffer,
    ) -> Result<(), CudaError>;
}

/// An average that updates move on, and that its owner reads.
pub(crate) type Shared = Arc<Mutex<dyn MovingAverage>>;

/// The averages of a model.
#[derive(Debug, Default)]
pub(crate) struct Averages {
    /// Averages that an owner may still have, in the order in which they were made.
    all: Vec<Weak<Mutex<dyn MovingAverage>>>,
    /// Number of the last average that a program has made.
    last: u32,
}

impl Averages {
    pub(crate) fn add(&mut self, average: &Shared) {
        self.all.push(Arc::downgrade(average));
    }

    /// Returns the number of a new average, from 1 in the order of creation. It does not depend on
    /// the averages that this rank has dropped, so it is equal on all ranks.
    pub(crate) fn next_number(&mut self) -> u32 {
        self.last = self.last.saturating_add(1);
        self.last
    }

    /// Returns the averages that an owner still has.
    pub(crate) fn living(&mut self) -> Vec<Shared> {
        self.all.retain(|average| average.strong_count() > 0);
        self.all.iter().filter_map(Weak::upgrade).collect()
    }
}

/// The squares of this rank's elements before an update and of their changes, by parameter.
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
