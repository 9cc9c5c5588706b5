//! The times of the parts of a step.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A part of a step.
#[derive(Clone, Copy, Debug)]
pub enum StepPart {
    /// The step's header.
    Begin,
    /// The begin of a microbatch.
    Microbatch,
    /// An unshard of the forward.
    Forward,
    /// The loss of a microbatch.
    Loss,
    /// An unshard of the backward.
    Backward,
    /// The issue of a reduction.
    Reduce,
    /// The end of a microbatch.
    MicrobatchEnd,
    /// The end of the step: all-reduces, agreement, division.
    Finish,
}

impl StepPart {
    /// All parts, in the order of a step.
    pub const ALL: [Self; 8] = [
        Self::Begin,
        Self::Microbatch,
        Self::Forward,
        Self::Loss,
        Self::Backward,
        Self::Reduce,
        Self::MicrobatchEnd,
        Self::Finish,
    ];

    /// The name of the part, and how often it happens.
    #[must_use]
    pub fn name(self) -> (&'static str, Per) {
        match self {
            Self::Begin => ("begin the step", Per::Step),
            Self::Microbatch => ("begin a microbatch", Per::Microbatch),
            Self::Forward => ("unshard, forward", Per::Unit),
            Self::Loss => ("loss", Per::Microbatch),
            Self::Backward => ("unshard, backward", Per::Unit),
            Self::Reduce => ("reduce", Per::Unit),
            Self::MicrobatchEnd => ("finish a microbatch", Per::Microbatch),
            Self::Finish => ("finish the step", Per::Step),
        }
    }
}

/// The period in which a part happens once.
#[derive(Clone, Copy, Debug)]
pub enum Per {
    /// Each step.
    Step,
    /// Each microbatch.
    Microbatch,
    /// Each unit in each microbatch.
    Unit,
}

/// A function that reads a clock: the time since some moment.
type ReadClock = fn() -> Duration;

/// Adds up the time of each part. A stopped stopwatch reads no clock.
#[derive(Clone, Debug)]
pub struct Stopwatch {
    clock: Option<ReadClock>,
    last: Duration,
    times: [Duration; StepPart::ALL.len()],
}

impl Stopwatch {
    /// A stopped stopwatch.
    #[must_use]
    pub fn still() -> Self {
        Self { clock: None, last: Duration::ZERO, times: Default::default() }
    }

    /// A stopwatch that runs from now.
    #[must_use]
    pub fn running() -> Self {
        Self::of_clock(monotonic)
    }

    /// A stopwatch that runs from now, by this clock.
    #[must_use]
    pub fn of_clock(clock: ReadClock) -> Self {
        Self { clock: Some(clock), last: clock(), ..Self::still() }
    }

    /// Begins anew, from now.
    pub fn restart(&mut self) {
        *self = self.clock.map_or_else(Self::still, Self::of_clock);
    }

    /// Adds the time since the last lap to this part.
    pub fn lap(&mut self, part: StepPart) {
        if let Some(clock) = self.clock {
            let now = clock();
            self.times[part as usize] += now.saturating_sub(self.last);
            self.last = now;
        }
    }

    /// The total time of a part.
    #[must_use]
    pub fn time(&self, part: StepPart) -> Duration {
        self.times[part as usize]
    }
}

fn monotonic() -> Duration {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed()
}
