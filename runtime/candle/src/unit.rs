//! The state of one unit in one microbatch: the place of its parameters, and its outstanding
//! gradients.
//!
//! ```text
//!            forward                                  backward
//!   Unused ---gather---> Full ---reshard---> Freed ---gather---> Full ---settle---> Done
//!                          \______________(kept)__________________/
//! ```
//!
//! A unit is done when three conditions hold. First, every trainable parameter that was read has its
//! gradient, in all its pieces: one from candle's graph, where candle finishes all readers of a
//! tensor before the tensor itself, and one from each recomputed use, which has a graph of its own.
//! Second, the backward of each sum of statistics is over. Third, no use holds the unit for its
//! frozen parameters, which have no gradient (see [`UnitUsage`]).

use std::cell::Cell;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device, Shape, Tensor};
use hsdp::{Full, ModelSpec, PassHandle, Phase, UnitId};
use hsdp_sharding::{AfterForward, Role};
use parking_lot::Mutex;

use crate::error::{Error, LostGradients};
use crate::gradient::GradientSum;
use crate::layer;
use crate::storage::{Gathered, vacate};

/// A unit in one microbatch. Custom ops hold it, so it holds no tensor that an op made, which would
/// be a cycle.
#[derive(Debug)]
pub(crate) struct LiveUnit {
    id: UnitId,
    handle: PassHandle,
    /// Dtype of the parameters.
    dtype: DType,
    /// Device on which candle computes.
    device: Device,
    state: Arc<PassState>,
    ledger: Mutex<UnitLedger>,
}

/// Kind of a pass, which decides on its parameters and on its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassKind {
    /// A microbatch of a step, which has a backward of its own.
    Training,
    /// A batch of an evaluation without a backward. Parameters are tensors without a history.
    Evaluation,
    /// A batch of an evaluation that takes part in the backward of another pass. Parameters are
    /// tensors without a history, and are gathered again for that backward.
    EvaluationWithBackward,
}

/// State of a pass that its units share.
#[derive(Debug)]
pub(crate) struct PassState {
    kind: PassKind,
    /// Whether the backward has begun, or the pass is over. Gradients that arrive after the
    /// microbatch are stale, which the runtime reports.
    is_past_forward: AtomicBool,
    /// Bits of the factor of all gradients of parameters.
    factor: AtomicU32,
    /// The first unit in which values of this rank counted in the statistics of all ranks.
    counted: OnceLock<UnitId>,
}

impl PassState {
    pub(crate) fn new(kind: PassKind) -> Self {
        Self {
            kind,
            is_past_forward: AtomicBool::default(),
            factor: AtomicU32::default(),
            counted: OnceLock::new(),
        }
    }

    /// Begins to accept gradients. Each gradient of a parameter is multiplied by `factor`, in f32.
    pub(crate) fn begin_backward(&self, factor: f32) {
        self.factor.store(factor.to_bits(), Ordering::Relaxed);
        self.end_forward();
    }

    pub(crate) fn end_forward(&self) {
        self.is_past_forward.store(true, Ordering::Relaxed);
    }

    /// Returns the first unit in which values of this rank counted in the statistics of all ranks.
    pub(crate) fn counted(&self) -> Option<UnitId> {
        self.counted.get().copied()
    }

    fn is_in_forward(&self) -> bool {
        !self.is_past_forward.load(Ordering::Relaxed)
    }

    fn factor(&self) -> f32 {
        f32::from_bits(self.factor.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
struct UnitLedger {
    contents: UnitContents,
    parameters: Vec<UnitParameter>,
    /// Number of outstanding pieces of gradients, and of statistics whose backward is to come.
    awaited: usize,
    /// Indices of those statistics through which gradients flow to the batch.
    statistics: Vec<usize>,
    /// Number of uses whose backward may still read frozen parameters.
    holds: usize,
}

/// A parameter of the unit in this microbatch.
#[derive(Clone, Debug, Default)]
struct UnitParameter {
    /// A tensor without an op that shares its storage, if it was read.
    storage: Option<Tensor>,
    /// Whether candle's graph reads it, and so contributes one piece of its gradient.
    in_graph: bool,
    /// Sum of the gradient's pieces so far.
    gradient: Option<GradientSum>,
}

#[derive(Debug)]
enum UnitContents {
    /// Not gathered so far.
    Unused,
    /// Freed after its use in the forward. The storages are vacant.
    Freed,
    /// Gathered. The parameters that were read are in their storages, and the others are in this
    /// `Full`.
    Full(Full),
    /// No longer needed in this microbatch.
    Done,
}

impl LiveUnit {
    pub(crate) fn new(
        id: UnitId,
        handle: PassHandle,
        dtype: DType,
        device: Device,
        state: Arc<PassState>,
    ) -> Self {
        let parameters = vec![UnitParameter::default(); handle.plan().spec()[id].params.len()];
        let ledger = UnitLedger {
            contents: UnitContents::Unused,
            parameters,
            awaited: 0,
            statistics: Vec::new(),
            holds: 0,
        };
        Self { id, handle, dtype, device, state, ledger: Mutex::new(ledger) }
    }

    /// Returns the unit's index in the model.
    pub(crate) fn id(&self) -> UnitId {
        self.id
    }

    /// Returns the device on which candle computes.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the description of the model.
    pub(crate) fn spec(&self) -> &ModelSpec {
        self.handle.plan().spec()
    }

    /// Returns the dtype of the parameters.
    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn name(&self) -> &str {
        &self.spec()[self.id].name
    }

    /// Returns whether the parameter is trainable or frozen in this pass: in an evaluation, all are
    /// frozen.
    pub(crate) fn role(&self, index: usize) -> Role {
        match self.kind() {
            PassKind::Training => self.spec()[self.id].params[index].role,
            PassKind::Evaluation | PassKind::EvaluationWithBackward => Role::Frozen,
        }
    }

    /// Returns the part of the pass in a backward.
    pub(crate) fn kind(&self) -> PassKind {
        self.state.kind
    }

    /// Returns the shape of a parameter.
    pub(crate) fn shape(&self, index: usize) -> Shape {
        Shape::from(self.spec()[self.id].params[index].shape.clone())
    }

    /// Gathers the parameters for a use in the forward. May wait for a gather, and so for other
    /// ranks.
    pub(crate) fn gather(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        match ledger.contents {
            UnitContents::Full(_) => Ok(()),
            UnitContents::Unused => self.unshard(&mut ledger),
            UnitContents::Freed | UnitContents::Done => {
                Err(Error::Freed { unit: self.name().to_owned() })
            }
        }
    }

    /// Gathers the parameters for the backward of a use.
    pub(crate) fn gather_again(&self) -> Result<(), Error> {
        self.check_backward()?;
        let mut ledger = self.ledger.lock();
        match ledger.contents {
            UnitContents::Full(_) | UnitContents::Done => Ok(()),
            UnitContents::Unused | UnitContents::Freed => self.unshard(&mut ledger),
        }
    }

    fn unshard(&self, ledger: &mut UnitLedger) -> Result<(), Error> {
        let _span = tracing::trace_span!("gather", unit = self.id.index()).entered();
        let mut full = self.handle.unshard(self.id)?;
        for (index, storage) in ledger.storages() {
            let parameter = Gathered::take(&mut full, index, &self.device);
            parameter.map_or(Ok(()), |parameter| parameter.fill(storage))?;
        }
        ledger.contents = UnitContents::Full(full);
        Ok(())
    }

    /// Takes out a parameter that was not read before.
    ///
    /// # Panics
    /// If the unit is not full or the parameter was read before. The pass prevents both.
    pub(crate) fn take(&self, index: usize) -> Gathered {
        match &mut self.ledger.lock().contents {
            UnitContents::Full(full) => {
                Gathered::take(full, index, &self.device).expect("the pass takes a parameter once")
            }
            other => unreachable!("the pass has gathered the unit, but it is {other:?}"),
        }
    }

    /// Records that a parameter was taken out, as `tensor`.
    pub(crate) fn was_taken(&self, index: usize, tensor: &Tensor) {
        self.ledger.lock().parameters[index].storage = Some(layer::plain(tensor));
    }

    /// Returns a tensor without an op that shares the storage of a parameter, if the parameter was
    /// read.
    pub(crate) fn taken(&self, index: usize) -> Option<Tensor> {
        self.ledger.lock().parameters[index].storage.clone()
    }

    /// Expects a piece of the gradient of a trainable parameter from candle's graph, which is one
    /// for all its reads.
    pub(crate) fn awaits_graph(&self, index: usize) {
        let mut ledger = self.ledger.lock();
        let known = mem::replace(&mut ledger.parameters[index].in_graph, true);
        ledger.awaited += usize::from(!known);
    }

    /// Expects a piece of the gradient of a trainable parameter from a recomputed use.
    pub(crate) fn awaits_piece(&self) {
        self.ledger.lock().awaited += 1;
    }

    /// Expects the backward of statistics. `reaches_batch` tells whether a gradient flows through
    /// them.
    pub(crate) fn awaits_statistics(&self, index: usize, reaches_batch: bool) {
        let mut ledger = self.ledger.lock();
        ledger.awaited += 1;
        ledger.statistics.extend(reaches_batch.then_some(index));
    }

    /// Refuses a backward that did not come to statistics through which gradients flow.
    pub(crate) fn check_statistics(&self) -> Result<(), Error> {
        if self.ledger.lock().statistics.is_empty() {
            return Ok(());
        }
        Err(Error::LostGradients(LostGradients::Unreached { unit: self.name().to_owned() }))
    }

    /// Sums statistics of a layer over all ranks in the forward.
    pub(crate) fn sum_forward(&self, index: usize, own: Vec<f64>) -> Result<Vec<f64>, Error> {
        if own.first().is_some_and(|count| *count > 0.0) {
            self.state.counted.get_or_init(|| self.id);
        }
        Ok(self.handle.statistics(self.id, index, Phase::Forward, own)?)
    }

    /// Sums statistics of a layer over all ranks in the backward. Each rank's are in the units of
    /// the gradients of parameters before they are added.
    pub(crate) fn sum_backward(&self, index: usize, mut own: Vec<f64>) -> Result<Vec<f64>, Error> {
        self.check_backward()?;
        let factor = f64::from(self.state.factor());
        own.iter_mut().for_each(|it| *it *= factor);
        let mut sums = self.handle.statistics(self.id, index, Phase::Backward, own)?;
        sums.iter_mut().for_each(|it| *it /= factor);
        self.ledger.lock().statistics.retain(|it| *it != index);
        self.end_statistics()?;
        Ok(sums)
    }

    /// Ends the wait for the backward of statistics.
    pub(crate) fn end_statistics(&self) -> Result<(), Error> {
        self.arrived(&mut self.ledger.lock())
    }

    /// Frees the parameters after a use in the forward, unless the unit is kept.
    pub(crate) fn reshard(&self) -> Result<(), Error> {
        match self.spec()[self.id].after_forward {
            AfterForward::Reshard | AfterForward::Discard => {
                self.ledger.lock().free(UnitContents::Freed)
            }
            AfterForward::Keep => Ok(()),
        }
    }

    /// Accepts a piece of a parameter's gradient. `None` if a recomputed use found that it has
    /// none. The last piece starts the reduction of the unit.
    pub(crate) fn accept(&self, index: usize, piece: Option<GradientSum>) -> Result<(), Error> {
        self.check_backward()?;
        let mut ledger = self.ledger.lock();
        if let Some(piece) = piece {
            let gradient = &mut ledger.parameters[index].gradient;
            *gradient = Some(match gradient.take() {
                Some(sum) => sum.plus(piece)?,
                None => piece,
            });
        }
        self.arrived(&mut ledger)
    }

    /// Expects one piece less. The last one starts the reduction of the unit.
    fn arrived(&self, ledger: &mut UnitLedger) -> Result<(), Error> {
        let Some(awaited) = ledger.awaited.checked_sub(1) else {
            return Err(self.of_another_pass());
        };
        ledger.awaited = awaited;
        self.settle(ledger)
    }

    /// Checks that the backward that runs here may come to this unit: that of its own pass, or if
    /// this is an evaluation with a backward, that of any other one.
    fn check_backward(&self) -> Result<(), Error> {
        let unit = || self.name().to_owned();
        let error = match (self.kind(), self.state.is_in_forward()) {
            (PassKind::Training, false) => return Ok(()),
            _ if !BackwardHere::runs_here() => {
                Error::LostGradients(LostGradients::TensorBackward { unit: unit() })
            }
            (PassKind::Training, true) | (PassKind::Evaluation, _) => self.of_another_pass(),
            (PassKind::EvaluationWithBackward, true) => return Ok(()),
            (PassKind::EvaluationWithBackward, false) => {
                Error::LostGradients(LostGradients::BatchFinished { unit: unit() })
            }
        };
        self.handle.note_failure(&error);
        Err(error)
    }

    /// Refuses a second backward through one use in an evaluation. That of a training is refused
    /// as one of another pass.
    fn check_used(&self) -> Result<(), Error> {
        if self.kind() != PassKind::EvaluationWithBackward {
            return Ok(());
        }
        let unit = self.name().to_owned();
        Err(Error::LostGradients(LostGradients::BatchUsed { unit }))
    }

    fn of_another_pass(&self) -> Error {
        Error::LostGradients(LostGradients::OtherPass { what: format!("unit {}", self.name()) })
    }

    /// Keeps the unit full until a [`release`](Self::release), even if all gradients arrive before.
    /// Without a release, keeps it full until [`finish`](Self::finish).
    pub(crate) fn hold(&self) {
        self.ledger.lock().holds += 1;
    }

    /// Reverts a [`hold`](Self::hold).
    pub(crate) fn release(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        ledger.holds -= 1;
        self.settle(&mut ledger)
    }

    /// Frees the parameters after the backward, and reduces the gradients that arrived, even if
    /// others are missing.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        let mut ledger = self.ledger.lock();
        ledger.free(UnitContents::Done)?;
        self.reduce(&mut ledger)
    }

    /// Clears the state of the microbatch. If a graph of it is used later, the graph finds the unit
    /// freed and its handle stale.
    pub(crate) fn end(&self) -> Result<(), Error> {
        self.ledger.lock().free(UnitContents::Freed)
    }

    fn settle(&self, ledger: &mut UnitLedger) -> Result<(), Error> {
        if ledger.awaited > 0 {
            return Ok(());
        }
        if ledger.holds == 0 {
            ledger.free(UnitContents::Done)?;
        }
        self.reduce(ledger)
    }

    /// Reduces the gradients that have arrived. A unit without any is left to the end of the
    /// microbatch.
    fn reduce(&self, ledger: &mut UnitLedger) -> Result<(), Error> {
        let gradients: Vec<_> = ledger.parameters.iter_mut().map(|it| it.gradient.take()).collect();
        if gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        let factor = self.state.factor();
        let lent = |gradient: Option<GradientSum>| {
            gradient.map(|it| it.lent(self.dtype, factor)).transpose()
        };
        let gradients = gradients.into_iter().map(lent).collect::<candle_core::Result<_>>()?;
        Ok(self.handle.reduce(self.id, gradients)?)
    }
}

thread_local! {
    static IN_BACKWARD: Cell<bool> = const { Cell::new(false) };
}

/// Marks that this thread runs the backward of a pass.
pub(crate) struct BackwardHere(());

impl BackwardHere {
    pub(crate) fn begin() -> Self {
        IN_BACKWARD.set(true);
        Self(())
    }

    fn runs_here() -> bool {
        IN_BACKWARD.get()
    }
}

impl Drop for BackwardHere {
    fn drop(&mut self) {
        IN_BACKWARD.set(false);
    }
}

impl UnitLedger {
    /// Returns the storages of the parameters that were read, with their indices.
    fn storages(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        let parameters = self.parameters.iter().enumerate();
        parameters.filter_map(|(index, parameter)| Some((index, parameter.storage.as_ref()?)))
    }

    fn free(&mut self, contents: UnitContents) -> Result<(), Error> {
        let mut before = mem::replace(&mut self.contents, contents);
        for (index, storage) in self.storages() {
            if let (Some(buffer), UnitContents::Full(full)) = (vacate(storage)?, &mut before) {
                full.put_back(index, buffer);
            }
        }
        Ok(())
    }
}

/// One run of a unit by a pass. It reads its own unit, and others through tied names.
#[derive(Debug)]
pub(crate) struct UnitUsage {
    reads: Mutex<Vec<Arc<LiveUnit>>>,
    held: Mutex<Vec<Arc<LiveUnit>>>,
    /// Number of watched inputs that the backward has not left.
    watched: AtomicUsize,
    /// Whether a backward has come to this use.
    has_backward: AtomicBool,
}

/// Whether hooks on the inputs of a unit report when the backward of a use is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputWatch {
    /// There are no hooks, because the pass has no backward or the model no frozen parameter.
    Off,
    /// Each differentiated input has a hook. Until all hooks of a use have run, units whose frozen
    /// parameters it read stay full. Where one never runs, as without a differentiated input, they
    /// stay full until the whole backward is over.
    Inputs,
}

impl UnitUsage {
    /// Returns a use of `own`.
    pub(crate) fn of(own: &Arc<LiveUnit>) -> Arc<Self> {
        Arc::new(Self {
            reads: Mutex::new(vec![Arc::clone(own)]),
            held: Mutex::default(),
            watched: AtomicUsize::new(0),
            has_backward: AtomicBool::new(false),
        })
    }

    /// Records that this use reads a parameter of `unit`.
    pub(crate) fn reads(&self, unit: &Arc<LiveUnit>) {
        add(&mut self.reads.lock(), unit);
    }

    /// Records that this use reads a frozen parameter of `unit`. Holds the unit until
    /// [`release`](Self::release), which is never called if no input is watched.
    pub(crate) fn reads_frozen(&self, unit: &Arc<LiveUnit>) {
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
        let reads = self.reads.lock();
        if self.has_backward.swap(true, Ordering::Relaxed) {
            reads.iter().try_for_each(|unit| unit.check_used())?;
        }
        reads.iter().try_for_each(|unit| unit.gather_again())
    }

    /// Records that an input has a hook, which calls [`leave_input`](Self::leave_input).
    pub(crate) fn watch_input(&self) {
        self.watched.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases the units that this use holds, if the backward has left all watched inputs.
    pub(crate) fn leave_input(&self) -> Result<(), Error> {
        match self.watched.fetch_sub(1, Ordering::Relaxed) {
            1 => self.release(),
            _ => Ok(()),
        }
    }

    /// Releases the units that this use holds, after its backward.
    pub(crate) fn release(&self) -> Result<(), Error> {
        self.held.lock().drain(..).try_for_each(|unit| unit.release())
    }
}

/// Adds `unit`, and returns whether it is new.
fn add(units: &mut Vec<Arc<LiveUnit>>, unit: &Arc<LiveUnit>) -> bool {
    let new = !units.iter().any(|known| Arc::ptr_eq(known, unit));
    if new {
        units.push(Arc::clone(unit));
    }
    new
}
