//! What the parts of a step take.

use std::time::{Duration, Instant};

/// A part of a step.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// The step's header.
    Begin,
    /// A microbatch is begun.
    Microbatch,
    /// An unshard of the forward.
    Forward,
    /// The loss is taken.
    Loss,
    /// An unshard of the backward.
    Backward,
    /// A reduction is issued.
    Reduce,
    /// A microbatch is finished.
    MicrobatchEnd,
    /// The step is finished: all-reduces, agreement, division.
    Finish,
}

impl Part {
    /// In the order in which they come.
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

    /// The part, and what it is counted by.
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

/// What a part happens once for.
#[derive(Clone, Copy, Debug)]
pub enum Per {
    /// Each step.
    Step,
    /// Each microbatch.
    Microbatch,
    /// Each unit in each microbatch.
    Unit,
}

/// Adds up what each part takes; one that stands still reads no clock.
#[derive(Clone, Debug)]
pub struct Stopwatch {
    last: Option<Instant>,
    times: [Duration; Part::ALL.len()],
}

impl Stopwatch {
    /// One that stands still.
    #[must_use]
    pub fn still() -> Self {
        Self { last: None, times: Default::default() }
    }

    /// One that runs from now.
    #[must_use]
    pub fn running() -> Self {
        Self { last: Some(Instant::now()), ..Self::still() }
    }

    /// What went by since the last lap was this part.
    pub fn lap(&mut self, part: Part) {
        if let Some(last) = &mut self.last {
            let now = Instant::now();
            self.times[part as usize] += now - *last;
            *last = now;
        }
    }

    /// What a part took in all.
    #[must_use]
    pub fn time(&self, part: Part) -> Duration {
        self.times[part as usize]
    }
}
