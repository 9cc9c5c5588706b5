//! Where the time of a step goes.

use std::ops::{Add, Mul};

use hsdp_flight::Stage;

use crate::Time;
use crate::host::Work;

/// A part of a step's time. The parts of a rank add up to the time of its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Share {
    /// Forward, backward, loss, and the accumulation of gradients.
    Computation,
    /// The device waits for the host, which launches kernels and issues operations.
    Host,
    /// Gathers that computation waits for; where the model is in host memory, also the thread's part of them.
    Gathers,
    /// The same of reduce-scatters.
    Reductions,
    /// The same of all-reduces.
    AllReduces,
    /// The norm and the update.
    Optimizer,
    /// Exchanges on the control channel.
    Exchanges,
    /// Waiting for ranks that are late.
    Waiting,
}

impl Share {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Computation,
        Self::Host,
        Self::Gathers,
        Self::Reductions,
        Self::AllReduces,
        Self::Optimizer,
        Self::Exchanges,
        Self::Waiting,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Computation => "computation",
            Self::Host => "host",
            Self::Gathers => "exposed gathers",
            Self::Reductions => "exposed reductions",
            Self::AllReduces => "exposed all-reduces",
            Self::Optimizer => "optimizer",
            Self::Exchanges => "exchanges",
            Self::Waiting => "waiting",
        }
    }

    /// The share of a wait for an operation of this stage.
    pub(super) const fn of(stage: Stage) -> Self {
        match stage {
            Stage::Gather => Self::Gathers,
            Stage::Reduce => Self::Reductions,
            Stage::AllReduce => Self::AllReduces,
            _ => Self::Exchanges,
        }
    }

    /// The share of computation.
    pub(super) const fn of_work(work: Work) -> Self {
        match work {
            Work::Norm | Work::Update => Self::Optimizer,
            _ => Self::Computation,
        }
    }
}

/// The time of each share, and the time for which a rank's links are busy, by level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    times: [Time; Share::ALL.len()],
    /// The time for which the rank's links carry bytes, by [`Level`](super::Level).
    pub(crate) busy: [Time; 2],
}

impl Shares {
    /// The time of a share.
    #[must_use]
    pub fn of(&self, share: Share) -> Time {
        self.times[share as usize]
    }

    /// The rank's links are busy.
    pub(super) fn carry(&mut self, busy: [Time; 2]) {
        self.busy.iter_mut().zip(busy).for_each(|(time, it)| *time += it);
    }

    pub(super) fn add(&mut self, share: Share, time: Time) {
        self.times[share as usize] += time;
    }

    /// The times since `earlier`.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        let mut since = *self;
        since
            .times
            .iter_mut()
            .zip(earlier.times)
            .for_each(|(time, it)| *time = time.saturating_sub(it));
        since
            .busy
            .iter_mut()
            .zip(earlier.busy)
            .for_each(|(time, it)| *time = time.saturating_sub(it));
        since
    }
}

impl Add for Shares {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self.times.iter_mut().zip(other.times).for_each(|(time, it)| *time += it);
        self.busy.iter_mut().zip(other.busy).for_each(|(time, it)| *time += it);
        self
    }
}

impl Mul<u64> for Shares {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            times: self.times.map(|time| time * times),
            busy: self.busy.map(|time| time * times),
        }
    }
}
