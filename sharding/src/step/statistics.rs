//! The statistics of a microbatch: sums over all ranks in the midst of a unit's forward and of its
//! backward, such as those of a batch norm.
//!
//! They are one sequence, equal on all ranks: in the order of the units in the forward, and in the
//! reverse order in the backward. A rank whose program leaves some out, as that of a rank without
//! data does, issues them with zeros. It waits for these at the end of the microbatch, because
//! other ranks may come to them late.

use super::output::{Operation, Output, Source};
use crate::{ModelSpec, Phase, UnitId};

/// The statistics of one microbatch.
#[derive(Debug, Default)]
pub(super) struct StatisticsQueue {
    /// The next ones, by phase.
    cursors: [StatisticsCursor; 2],
    /// Operations that were issued with zeros and not awaited.
    under_way: Vec<Operation>,
    own: OwnStatistics,
}

/// The next statistics of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StatisticsCursor {
    /// Number of units before theirs, in the order of the phase.
    pub(super) place: usize,
    /// Number of statistics of the unit before them, in the order of the phase.
    pub(super) index: usize,
}

/// Statistics that the program has given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum OwnStatistics {
    #[default]
    Nothing,
    /// They are under way.
    Issued(Operation),
    /// Their sums are there.
    Arrived,
}

impl StatisticsQueue {
    /// Returns the next statistics of a phase.
    pub(super) fn cursor(&self, phase: Phase) -> StatisticsCursor {
        self.cursors[phase as usize]
    }

    /// Begins a microbatch, when the one before is over.
    pub(super) fn begin(&mut self) {
        *self = Self::default();
    }

    /// Forgets the statistics of the forward from a unit on: it is gathered again.
    pub(super) fn truncate(&mut self, place: usize) {
        let cursor = &mut self.cursors[Phase::Forward as usize];
        *cursor = (*cursor).min(StatisticsCursor { place, index: 0 });
    }

    /// Issues the next statistics of a phase with zeros, if they are before `end`. `unit` returns
    /// the unit at a place in the order of the phase.
    pub(super) fn pass_next(
        &mut self,
        spec: &ModelSpec,
        phase: Phase,
        end: StatisticsCursor,
        unit: impl Fn(usize) -> UnitId,
    ) -> Option<Output> {
        let cursor = &mut self.cursors[phase as usize];
        while *cursor < end {
            let unit = unit(cursor.place);
            let count = spec[unit].statistics.len();
            if cursor.index == count {
                *cursor = StatisticsCursor { place: cursor.place + 1, index: 0 };
                continue;
            }
            let index = reversed_in_backward(phase, cursor.index, count);
            cursor.index += 1;
            self.under_way.push(Operation::Statistics { unit, index, phase });
            return Some(Output::Statistics { unit, index, phase, from: Source::Zeros });
        }
        None
    }

    /// Issues the program's statistics at a place, and waits for their sums. All statistics before
    /// them were issued.
    pub(super) fn own_next(
        &mut self,
        at: StatisticsCursor,
        unit: UnitId,
        index: usize,
        phase: Phase,
    ) -> Option<Output> {
        match self.own {
            OwnStatistics::Nothing => {
                self.cursors[phase as usize] =
                    StatisticsCursor { place: at.place, index: at.index + 1 };
                self.own = OwnStatistics::Issued(Operation::Statistics { unit, index, phase });
                Some(Output::Statistics { unit, index, phase, from: Source::Offered })
            }
            OwnStatistics::Issued(operation) => Some(Output::Await(operation)),
            OwnStatistics::Arrived => {
                self.own = OwnStatistics::Nothing;
                None
            }
        }
    }

    /// Returns whether the program's statistics were issued, and their sums not handed out.
    pub(super) fn has_own(&self) -> bool {
        self.own != OwnStatistics::Nothing
    }

    /// Waits for the statistics that were issued with zeros.
    pub(super) fn await_next(&self) -> Option<Output> {
        self.under_way.first().copied().map(Output::Await)
    }

    /// Notes that an operation is complete.
    pub(super) fn complete(&mut self, operation: Operation) {
        if self.own == OwnStatistics::Issued(operation) {
            self.own = OwnStatistics::Arrived;
        }
        self.under_way.retain(|it| *it != operation);
    }
}

/// Returns the index of statistics in their unit from their place in the order of a phase, or the
/// other way round.
pub(super) fn reversed_in_backward(phase: Phase, place: usize, count: usize) -> usize {
    match phase {
        Phase::Forward => place,
        Phase::Backward => count - 1 - place,
    }
}
