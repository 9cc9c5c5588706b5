//! Faults that a test injects into a rank. FAULTS.md, "Faults".
//!
//! In reading order: the faults, `parse` (faults from text), the faults that are due at a call. The
//! module `injection` commits them.

mod parse;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use half::f16;
use hsdp_kernels::GradientValues;
use hsdp_sharding::{Rank, UnitId};

use crate::sync::Mutex;
use crate::{Error, Stage, Tag, WorldError};

/// An injected fault: on one rank, in one step, at one of its calls. Fires once.
///
/// Faults are given in [`WorldOptions::faults`](crate::WorldOptions::faults). The step is the one
/// that the rank set last with [`World::set_step`](crate::World::set_step), 0 before. Displayed as
/// a sentence, which [`FromStr`](std::str::FromStr) reads.
///
/// ```
/// use hsdp_comm::{Fault, FaultKind, Stage, WorldOptions};
/// use hsdp_sharding::{Rank, UnitId};
///
/// let fault = Fault::at(Rank::new(1), 3, (UnitId::new(2), Stage::Reduce), FaultKind::Freeze);
/// assert_eq!(fault.to_string(), "rank 1, step 3, unit 2, reduce: freeze");
/// let options = WorldOptions { faults: vec![fault], ..WorldOptions::default() };
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Fault {
    /// The rank of the fault.
    pub rank: Rank,
    /// The step of the fault.
    pub step: u64,
    /// The call of that step.
    pub place: FaultPlace,
    /// The kind of fault.
    pub kind: FaultKind,
}

/// The call of a step at which a fault fires.
///
/// Calls that are refused before they reach their group (a count that does not fit, a step that has
/// ended) do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPlace {
    /// The first call whose tag names the unit.
    Unit(UnitId),
    /// The first call whose tag names the stage.
    Stage(Stage),
    /// The first call whose tag names both.
    UnitStage(UnitId, Stage),
    /// The n-th call, from 0, over all groups of the rank. A step that is repeated in a later epoch
    /// counts from 0 again. Where several threads of a rank issue, the numbers depend on timing.
    Call(u64),
}

/// The kind of a fault.
///
/// A group of one has no other member to compare calls with. There the kinds from
/// [`WrongOp`](Self::WrongOp) to [`ExtraCall`](Self::ExtraCall) end the call with
/// [`CallError::Injected`](crate::CallError).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FaultKind {
    /// The call panics in the rank's thread.
    Panic,
    /// The call returns [`CallError::Injected`](crate::CallError); nothing is issued.
    Error,
    /// The rank leaves its world without notice, as if its closure had returned. This call and all
    /// later ones of the rank return [`CallError::Injected`](crate::CallError); ranks that wait
    /// for it get an error that says that it has left.
    Leave,
    /// The rank sleeps for this time, or until the world ends, before it issues the call.
    Delay(Duration),
    /// The rank sleeps until the world ends, and returns the error that ended it. If all others
    /// have left, the world is never ended, and the call returns
    /// [`CallError::Injected`](crate::CallError).
    Freeze,
    /// The call states another operation: all_gather, or all_reduce if it is an all_gather.
    WrongOp,
    /// The call states another reduction: the next of [`Reduction::ALL`](crate::Reduction::ALL), or
    /// sum if it has none.
    WrongReduction,
    /// The call states another dtype: f32, or f64 if its dtype is f32.
    WrongDType,
    /// The call states one element more; a call without elements states 1 element of f32.
    WrongCount,
    /// The call states the next member as its root; a call without a root states this rank.
    WrongRoot,
    /// This call and the rank's next one on the same group swap their places in the sequence.
    SwappedOrder,
    /// The call meets no other member and takes no place in the sequence. It returns the output
    /// that a rank of [`World::counting`](crate::World::counting) gets.
    SkippedCall,
    /// A barrier is issued on the same group before the call, and no thread waits for it.
    ExtraCall,
    /// Element 0 of the first gradient that is passed to
    /// [`Group::reduce_unit`](crate::Group::reduce_unit) reads as this value, rounded to the
    /// gradient's dtype: NaN, an infinity, or at least 65520, which is infinite in f16. The fault
    /// waits for a call with a gradient: with [`FaultPlace::Call`], the first such call from that
    /// number on.
    NonFinite(f32),
    /// The call returns [`CallError::OutOfMemory`](crate::CallError), with the bytes of its
    /// elements; nothing is issued.
    OutOfMemory,
}

impl Fault {
    /// A fault of `kind` on `rank`, in `step`, at `place`.
    #[must_use]
    pub fn at(rank: Rank, step: u64, place: impl Into<FaultPlace>, kind: FaultKind) -> Self {
        Self { rank, step, place: place.into(), kind }
    }

    /// Checks that a world of `size` ranks can have this fault.
    ///
    /// # Errors
    /// [`WorldError::BadFault`] if it has no such rank, or a gradient that is to be non-finite
    /// would be finite.
    pub(crate) fn check(&self, size: usize) -> Result<(), Error> {
        let refused =
            |problem| Error::World(WorldError::BadFault { fault: self.to_string(), problem });
        if self.rank.index() >= size {
            let problem = format!("the world has {size} ranks, numbered from 0");
            return Err(refused(problem));
        }
        self.check_kind().map_err(refused)
    }

    /// Checks the value of the kind.
    fn check_kind(&self) -> Result<(), String> {
        match self.kind {
            // No dtype of gradients has a smaller range.
            FaultKind::NonFinite(value) if f16::from_f32(value).is_finite() => {
                Err(format!("a gradient of {value} is finite in every dtype"))
            }
            _ => Ok(()),
        }
    }
}

impl FaultKind {
    /// The kinds without a value of their own, each with its name.
    pub const PLAIN: [(Self, &'static str); 13] = [
        (Self::Panic, "panic"),
        (Self::Error, "error"),
        (Self::Leave, "leave"),
        (Self::Freeze, "freeze"),
        (Self::WrongOp, "wrong operation"),
        (Self::WrongReduction, "wrong reduction"),
        (Self::WrongDType, "wrong dtype"),
        (Self::WrongCount, "wrong count"),
        (Self::WrongRoot, "wrong root"),
        (Self::SwappedOrder, "swapped order"),
        (Self::SkippedCall, "skipped call"),
        (Self::ExtraCall, "extra call"),
        (Self::OutOfMemory, "out of memory"),
    ];
}

impl From<UnitId> for FaultPlace {
    fn from(unit: UnitId) -> Self {
        Self::Unit(unit)
    }
}

impl From<Stage> for FaultPlace {
    fn from(stage: Stage) -> Self {
        Self::Stage(stage)
    }
}

impl From<(UnitId, Stage)> for FaultPlace {
    fn from((unit, stage): (UnitId, Stage)) -> Self {
        Self::UnitStage(unit, stage)
    }
}

impl From<u64> for FaultPlace {
    fn from(call: u64) -> Self {
        Self::Call(call)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, step, place, kind } = self;
        write!(f, "rank {rank}, step {step}, {place}: {kind}")
    }
}

impl fmt::Display for FaultPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unit(unit) => write!(f, "unit {}", unit.index()),
            Self::Stage(stage) => write!(f, "{stage}"),
            Self::UnitStage(unit, stage) => write!(f, "unit {}, {stage}", unit.index()),
            Self::Call(call) => write!(f, "call {call}"),
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Delay(delay) => write!(f, "delay of {delay:?}"),
            Self::NonFinite(value) => write!(f, "a gradient of {value}"),
            plain => {
                let named = Self::PLAIN.into_iter().find(|(kind, _)| kind == plain);
                f.pad(named.expect("PLAIN has every kind without a value").1)
            }
        }
    }
}

/// The faults of one rank. Where there are none, all that a call pays for them is a look at a flag.
#[derive(Debug, Default)]
pub(crate) struct Injector {
    has_faults: bool,
    progress: Mutex<FaultProgress>,
}

/// The progress of a rank.
#[derive(Debug, Default)]
struct FaultProgress {
    /// The faults that have not fired.
    armed: Vec<Fault>,
    /// The step of its last call.
    step: u64,
    /// The epoch of its last call.
    epoch: u64,
    /// Its calls in that step, and in no other epoch.
    calls: u64,
    left: bool,
}

impl Injector {
    pub(crate) fn new(faults: impl Iterator<Item = Fault>) -> Self {
        let armed: Vec<Fault> = faults.collect();
        let has_faults = !armed.is_empty();
        Self {
            has_faults,
            progress: Mutex::new(FaultProgress { armed, ..FaultProgress::default() }),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.has_faults
    }

    /// Counts a call in a step of an epoch, and takes the faults that are due at it, in the order
    /// in which they were given. A value that is not finite is due only where a gradient has
    /// elements.
    pub(crate) fn due(
        &self,
        step: u64,
        epoch: u64,
        tag: &Tag,
        gradients: &[Option<Arc<dyn GradientValues>>],
    ) -> Vec<Fault> {
        let has_gradient = gradients.iter().flatten().any(|it| !it.is_empty());
        let mut progress = self.progress.lock();
        if (progress.step, progress.epoch) != (step, epoch) {
            progress.step = step;
            progress.epoch = epoch;
            progress.calls = 0;
        }
        let number = progress.calls;
        progress.calls += 1;
        let is_due = |fault: &mut Fault| {
            let can_be = has_gradient || !matches!(fault.kind, FaultKind::NonFinite(_));
            can_be && fault.step == step && is_at(fault, number, tag)
        };
        progress.armed.extract_if(.., is_due).collect()
    }

    /// The faults that have not fired.
    pub(crate) fn armed(&self) -> Vec<Fault> {
        self.progress.lock().armed.clone()
    }

    /// From now on the rank is gone.
    pub(crate) fn leave(&self) {
        self.progress.lock().left = true;
    }

    pub(crate) fn has_left(&self) -> bool {
        self.progress.lock().left
    }
}

/// Whether a fault is at the `number`-th call of a step. A value that is not finite waits for a
/// gradient, from its call on.
fn is_at(fault: &Fault, number: u64, tag: &Tag) -> bool {
    let is_non_finite = matches!(fault.kind, FaultKind::NonFinite(_));
    match fault.place {
        FaultPlace::Unit(unit) => tag.unit == Some(unit),
        FaultPlace::Stage(stage) => tag.stage == stage,
        FaultPlace::UnitStage(unit, stage) => tag.unit == Some(unit) && tag.stage == stage,
        FaultPlace::Call(call) => call == number || is_non_finite && call < number,
    }
}
