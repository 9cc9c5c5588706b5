//! The counts of a rank: the calls that it has issued, and the bytes that came from other ranks.
//!
//! Bytes are those of the operation's pattern, and are added when all members have come. A plan has
//! formulas of its own, which can be held against them.

use std::array;
use std::ops::Sub;

use crossbeam::utils::CachePadded;
use hsdp_sharding::{ByteCount, Flow};

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::{Channel, Op};

const CHANNELS: usize = Channel::ALL.len();
const OPS: usize = Op::ALL.len();

/// The running counts of one rank, apart in memory: calls are the rank's own to count, and bytes
/// are added by the member that comes last, on any thread; a wait that has returned orders them.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    calls: CachePadded<Cells>,
    bytes: CachePadded<Cells>,
    messages: CachePadded<[AtomicU64; 4]>,
}

type Cells = [[AtomicU64; OPS]; CHANNELS];

impl Ledger {
    pub(crate) fn call(&self, channel: Channel, op: Op) {
        self.calls[channel as usize][op as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn received(&self, channel: Channel, op: Op, bytes: ByteCount) {
        self.bytes[channel as usize][op as usize].fetch_add(bytes.get(), Relaxed);
    }

    pub(crate) fn snapshot(&self) -> LedgerSnapshot {
        let read = |channel: usize, op: usize| Flow {
            calls: self.calls[channel][op].load(Relaxed),
            bytes: ByteCount(self.bytes[channel][op].load(Relaxed)),
        };
        let cells = array::from_fn(|channel| array::from_fn(|op| read(channel, op)));
        LedgerSnapshot { cells }
    }

    pub(crate) fn messages(&self) -> Messages {
        Messages::of(array::from_fn(|kind| self.messages[kind].load(Relaxed)))
    }

    /// Adds to the messages of this rank.
    pub(crate) fn moved(&self, messages: Messages) {
        for (cell, count) in self.messages.iter().zip(messages.counts()) {
            if count > 0 {
                cell.fetch_add(count, Relaxed);
            }
        }
    }
}

/// The numbers of messages of a rank, where ranks share no memory.
///
/// The messages that begin and end a world or an epoch are in none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Messages {
    /// Messages of operations that it has sent.
    pub data: u64,
    /// Messages of exchanges that it has sent and received for itself: a small all-gather of all
    /// ranks on the control channel.
    pub control: u64,
    /// Messages that it has sent or received because a rank was late: early contributions to
    /// exchanges, and those by which the states of ranks are compared.
    pub background: u64,
    /// Messages of exchanges that it has sent and received for other ranks.
    pub forwarded: u64,
}

impl Messages {
    fn counts(self) -> [u64; 4] {
        [self.data, self.control, self.background, self.forwarded]
    }

    fn of([data, control, background, forwarded]: [u64; 4]) -> Self {
        Self { data, control, background, forwarded }
    }
}

impl Sub for Messages {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let later = self.counts();
        let earlier = earlier.counts();
        Self::of(array::from_fn(|kind| later[kind] - earlier[kind]))
    }
}

/// The calls that a rank had issued and the bytes that it had received at one moment, by channel
/// and operation.
///
/// Groups of one rank do not count, since no collective takes place. The bytes of an operation are
/// in every snapshot that is taken after its `wait`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerSnapshot {
    cells: [[Flow; OPS]; CHANNELS],
}

impl LedgerSnapshot {
    /// Calls of `op` on `channel`, and the bytes that they received from other ranks.
    #[must_use]
    pub fn op(&self, channel: Channel, op: Op) -> Flow {
        self.cells[channel as usize][op as usize]
    }

    /// Calls and bytes of all operations on `channel`.
    #[must_use]
    pub fn channel(&self, channel: Channel) -> Flow {
        self.cells[channel as usize].into_iter().sum()
    }

    /// The difference from `earlier`, a snapshot of the same rank.
    ///
    /// # Panics
    /// If `earlier` is the later snapshot.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut difference = self.clone();
        let cells = difference.cells.as_flattened_mut();
        for (after, before) in cells.iter_mut().zip(earlier.cells.as_flattened()) {
            let calls = after.calls.checked_sub(before.calls);
            after.calls = calls.expect("the earlier snapshot was taken first, of the same rank");
            after.bytes = after.bytes - before.bytes;
        }
        difference
    }
}
