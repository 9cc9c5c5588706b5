//! What a rank owns of its world: its record, its sequences, and the flavour that serves it.

use std::collections::HashMap;
use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::call::Call;
use crate::local::{Lifeline, Record, Status, in_block};
use crate::sync::Mutex;
use crate::{AbortReason, Channel, Descriptor, Error, GroupId, Op, StepFailure};

/// A rank's place in its world. All handles of a rank share it; when the last one goes, the rank has left.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    pub(crate) record: Arc<Record>,
    pub(crate) status: Arc<Status>,
    pub(crate) flavour: Flavour,
    sequences: Mutex<HashMap<(GroupId, usize), Arc<Sequence>>>,
}

/// Who serves the operations of a world.
#[derive(Debug)]
pub(crate) enum Flavour {
    /// Ranks are threads of this process.
    Local(Arc<Lifeline>),
    /// There is no other rank: calls and bytes are counted.
    Counting,
}

/// The numbers of the operations that this rank issues on one group.
#[derive(Debug, Default)]
pub(crate) struct Sequence(Mutex<Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    epoch: u64,
    next: u64,
}

impl Sequence {
    /// The next number in `epoch`; each epoch counts from 0.
    ///
    /// A thread that read the epoch before another thread of its rank went on gets a number that means nothing: its
    /// epoch is over, and its call will be refused.
    pub(crate) fn take(&self, epoch: u64) -> u64 {
        let mut numbers = self.0.lock();
        if numbers.epoch < epoch {
            *numbers = Numbers { epoch, next: 0 };
        }
        if numbers.epoch > epoch {
            return u64::MAX;
        }
        numbers.next += 1;
        numbers.next - 1
    }
}

impl Seat {
    pub(crate) fn local(lifeline: Arc<Lifeline>, rank: Rank) -> Self {
        let core = lifeline.core();
        let record = Arc::clone(&core.records()[rank.index()]);
        let (size, status) = (core.records().len(), Arc::clone(core.status()));
        let sequences = Mutex::default();
        Self { rank, size, record, status, flavour: Flavour::Local(lifeline), sequences }
    }

    pub(crate) fn counting(size: usize, rank: Rank) -> Self {
        let (record, status) = (Arc::default(), Arc::default());
        Self { rank, size, record, status, flavour: Flavour::Counting, sequences: Mutex::default() }
    }

    /// The sequence of a group, in which this rank has `slot`. All handles of one group share it; only who sends
    /// to itself has two slots.
    pub(crate) fn sequence(&self, group: GroupId, slot: usize) -> Arc<Sequence> {
        Arc::clone(self.sequences.lock().entry((group, slot)).or_default())
    }

    /// Whether an operation may be issued now.
    pub(crate) fn check(&self, op: Op) -> Result<(), Error> {
        if in_block() {
            return Err(Error::Reentrant { op, rank: self.rank });
        }
        self.status.check(self.record.epoch())
    }

    /// Gives a call its number on a sequence, and notes it as what this rank did last.
    ///
    /// Every operation of every rank passes here before it meets others: the place for a recorder, and
    /// for faults that are injected.
    pub(crate) fn enter(
        &self,
        group: GroupId,
        channel: Channel,
        sequence: &Sequence,
        call: Call,
    ) -> Result<Arc<Descriptor>, Error> {
        self.check(call.op)?;
        let epoch = self.record.epoch();
        let sequence = sequence.take(epoch);
        let Call { op, tag, dtype, counts, reduction, root, peer, scaling } = call;
        let descriptor = Arc::new(Descriptor {
            group,
            channel,
            epoch,
            sequence,
            op,
            reduction,
            dtype,
            counts,
            root,
            peer,
            scaling,
            tag,
        });
        self.record.enter(&descriptor);
        Ok(descriptor)
    }

    pub(crate) fn abort(&self, reason: &str) {
        let error = Error::WorldAborted {
            rank: self.rank,
            step: self.record.step(),
            operation: self.record.last(),
            reason: AbortReason::Requested { reason: reason.into() },
        };
        self.end(error);
    }

    /// Ends the world, with `error` unless it has ended before.
    pub(crate) fn end(&self, error: Error) -> Error {
        match &self.flavour {
            Flavour::Local(lifeline) => lifeline.core().end(error),
            Flavour::Counting => self.status.end_world(error),
        }
    }

    pub(crate) fn abort_step(&self, failure: StepFailure) {
        let StepFailure { step, reason } = failure;
        let error = Error::StepAborted { rank: self.rank, step, reason: reason.into() };
        let epoch = self.record.epoch();
        match &self.flavour {
            Flavour::Local(lifeline) => lifeline.core().end_epoch(epoch, error),
            Flavour::Counting => drop(self.status.end_epoch(epoch, error)),
        }
    }

    pub(crate) fn next_epoch(&self) -> u64 {
        let epoch = self.record.epoch();
        if self.status.is_aborted(epoch) {
            self.record.advance_epoch(epoch);
            match &self.flavour {
                Flavour::Local(lifeline) => lifeline.core().forget_old_epochs(),
                Flavour::Counting => self.status.forget_before(epoch + 1),
            }
        }
        self.record.epoch()
    }

    pub(crate) fn leave(&self) {
        if let Flavour::Local(lifeline) = &self.flavour {
            lifeline.core().leave(self.rank);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_begin_anew_in_each_epoch_and_never_go_back() {
        let sequence = Sequence::default();
        assert_eq!([sequence.take(0), sequence.take(0), sequence.take(2)], [0, 1, 0]);
        assert_eq!([sequence.take(0), sequence.take(2)], [u64::MAX, 1]);
    }
}
