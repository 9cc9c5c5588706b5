//! One use of a unit in the forward: the units that it read, and those that its backward needs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Tensor, TensorId};
use parking_lot::Mutex;

use crate::error::Error;
use crate::unit::UnitState;
use crate::variables::Reached;
use crate::zeros::{Cuts, are_zeros};

/// One call of [`Pass::unit`](crate::Pass::unit). It reads its own unit, and others through tied
/// names.
#[derive(Debug)]
pub(crate) struct Usage {
    reads: Mutex<Vec<Arc<UnitState>>>,
    held: Mutex<Vec<Arc<UnitState>>>,
    input_has_gradient: AtomicBool,
    /// Tensors whose backward gives zeros to the input.
    givers: Mutex<Vec<TensorId>>,
    cuts: Arc<Cuts>,
    /// Whether the output got zeros that stand for no gradient.
    is_cut_off: AtomicBool,
}

/// Whether a hook on the unit's input reports when the backward of this use is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// No: nothing frozen is read, or nothing before this use is differentiated. Units of which
    /// frozen parameters were read stay full until the whole backward is over.
    Off,
    /// Yes: until then, units of which frozen parameters were read stay full.
    Input,
}

impl Usage {
    /// Returns a use of `own` in a pass with these `cuts`.
    pub(crate) fn of(own: &Arc<UnitState>, cuts: &Arc<Cuts>) -> Arc<Self> {
        Arc::new(Self {
            reads: Mutex::new(vec![Arc::clone(own)]),
            held: Mutex::default(),
            input_has_gradient: AtomicBool::new(false),
            givers: Mutex::default(),
            cuts: Arc::clone(cuts),
            is_cut_off: AtomicBool::new(false),
        })
    }

    /// Notes that this use reads a parameter of `unit`.
    pub(crate) fn reads(&self, unit: &Arc<UnitState>) {
        add(&mut self.reads.lock(), unit);
    }

    /// Notes that this use reads a frozen parameter of `unit`. The unit is held until
    /// [`release`](Self::release), which is never called where the input is not watched.
    pub(crate) fn reads_frozen(&self, unit: &Arc<UnitState>) {
        if add(&mut self.held.lock(), unit) {
            unit.hold();
        }
    }

    /// Reshards the units that this use read, at its end in the forward.
    pub(crate) fn reshard(&self) -> Result<(), Error> {
        self.reads.lock().iter().try_for_each(|unit| unit.reshard())
    }

    /// Gathers the units that this use read, before its backward.
    pub(crate) fn gather(&self) -> Result<(), Error> {
        self.reads.lock().iter().try_for_each(|unit| unit.gather_again())
    }

    /// Releases the units that this use holds, after its backward.
    pub(crate) fn release(&self) -> Result<(), Error> {
        self.held.lock().drain(..).try_for_each(|unit| unit.release())
    }

    /// Notes a tensor whose backward gives zeros to the input if it has no gradient.
    pub(crate) fn note_giver(&self, tensor: &Tensor) {
        self.givers.lock().push(tensor.id());
    }

    /// Returns whether a backward comes to a tensor that gives zeros to the input.
    pub(crate) fn gives_zeros_in(&self, reached: &Reached) -> bool {
        self.givers.lock().iter().any(|giver| reached.has(*giver))
    }

    /// Notes the gradient of the output, before those of the parameters come.
    pub(crate) fn note_gradient(
        &self,
        output: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<()> {
        if self.cuts.are_behind(output) && are_zeros(gradient)? {
            self.is_cut_off.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the gradient of a parameter; `None` for zeros that come of those of the output.
    pub(crate) fn real<'a>(&self, gradient: &'a Tensor) -> candle_core::Result<Option<&'a Tensor>> {
        let is_filler = self.is_cut_off.load(Ordering::Relaxed) && are_zeros(gradient)?;
        Ok((!is_filler).then_some(gradient))
    }

    /// Zeros like `input` at the first call, if candle tracks `input`; else `None`.
    ///
    /// `input` is the second parent of this use's parameters. If none of the forward's own ops
    /// differentiates it, candle would find no gradient for it, and panic.
    pub(crate) fn gradient_of(&self, input: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if !input.track_op() || self.input_has_gradient.swap(true, Ordering::Relaxed) {
            return Ok(None);
        }
        // One zero, repeated: candle adds it to the gradient without a second buffer to fill and read.
        let zero = Tensor::zeros((), input.dtype(), input.device())?;
        zero.broadcast_as(input.shape()).map(Some)
    }
}

/// Adds `unit`, and returns whether it is new.
fn add(units: &mut Vec<Arc<UnitState>>, unit: &Arc<UnitState>) -> bool {
    let new = !units.iter().any(|known| Arc::ptr_eq(known, unit));
    if new {
        units.push(Arc::clone(unit));
    }
    new
}
