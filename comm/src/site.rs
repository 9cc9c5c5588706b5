//! The sites at which the members of a call meet, and the numbers of their calls there.
//! PROTOCOL.md, "Matching of calls".

use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::sync::Mutex;
use crate::{Channel, GroupId};

/// The site at which the members of a call meet: a group, the members that are left of it while
/// others are absent, or a pair of its members.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    pub(crate) id: GroupId,
    pub(crate) channel: Channel,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// This rank's.
    pub(crate) slot: usize,
    pub(crate) sequence: Arc<Sequence>,
}

/// The numbers of the operations that this rank issues on one group.
#[derive(Debug, Default)]
pub(crate) struct Sequence(Mutex<Given>);

/// The numbers that were given.
#[derive(Debug, Default)]
struct Given {
    epoch: u64,
    next: u64,
    /// Given below `next` that a fault took out of their order, the next to be given last.
    swapped: Vec<u64>,
}

impl Sequence {
    /// The next number in `epoch`; each epoch counts from 0.
    ///
    /// A thread that read the epoch before another thread of its rank went on gets a number that
    /// means nothing: its epoch is over, and its call will be refused.
    pub(crate) fn take(&self, epoch: u64) -> u64 {
        let mut numbers = self.0.lock();
        numbers.go_on_to(epoch);
        if numbers.epoch > epoch {
            return u64::MAX;
        }
        if let Some(number) = numbers.swapped.pop() {
            return number;
        }
        numbers.next += 1;
        numbers.next - 1
    }

    /// Has the next two calls in `epoch` take each other's numbers.
    pub(crate) fn swap_next(&self, epoch: u64) {
        let mut numbers = self.0.lock();
        numbers.go_on_to(epoch);
        if numbers.epoch == epoch && numbers.swapped.is_empty() {
            numbers.swapped = vec![numbers.next, numbers.next + 1];
            numbers.next += 2;
        }
    }
}

impl Given {
    fn go_on_to(&mut self, epoch: u64) {
        if self.epoch < epoch {
            *self = Self { epoch, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests;
