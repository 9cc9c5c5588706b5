//! What the parts of a step take.

use std::time::{Duration, Instant};

/// A part of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
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
    pub(crate) const ALL: [Self; 8] = [
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
    pub(crate) fn name(self) -> (&'static str, Per) {
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
pub(crate) enum Per {
    Step,
    Microbatch,
    Unit,
}

/// Adds up what each part takes; one that stands still reads no clock.
#[derive(Clone, Debug)]
pub(crate) struct Stopwatch {
    last: Option<Instant>,
    times: [Duration; Part::ALL.len()],
}

impl Stopwatch {
    pub(crate) fn still() -> Self {
        Self { last: None, times: Default::default() }
    }

    pub(crate) fn running() -> Self {
        Self { last: Some(Instant::now()), ..Self::still() }
    }

    /// What went by since the last lap was this part.
    pub(crate) fn lap(&mut self, part: Part) {
        if let Some(last) = &mut self.last {
            let now = Instant::now();
            self.times[part as usize] += now - *last;
            *last = now;
        }
    }

    pub(crate) fn time(&self, part: Part) -> Duration {
        self.times[part as usize]
    }
}
