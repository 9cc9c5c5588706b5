//! The operations that a rank has issued.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Descriptor, GroupId};

/// The operations that a rank has issued, by group: the numbers of a group come in order, except where a fault swaps them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Issued(pub(crate) BTreeMap<GroupId, Numbers>);

/// The numbers of a group's operations in the last epoch in which the rank has issued on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Numbers {
    pub(crate) epoch: u64,
    pub(crate) next: u64,
    /// Those below `next` that were left out.
    pub(crate) skipped: BTreeSet<u64>,
}

impl Issued {
    pub(crate) fn note(&mut self, descriptor: &Descriptor) {
        let numbers = self.0.entry(descriptor.group).or_default();
        if numbers.epoch != descriptor.epoch {
            *numbers = Numbers { epoch: descriptor.epoch, ..Numbers::default() };
        }
        let number = descriptor.sequence;
        if number < numbers.next {
            numbers.skipped.remove(&number);
        } else {
            numbers.skipped.extend(numbers.next..number);
            numbers.next = number + 1;
        }
    }

    pub(crate) fn has(&self, descriptor: &Descriptor) -> bool {
        let Some(numbers) = self.0.get(&descriptor.group) else { return false };
        let is_of_this_epoch = || {
            descriptor.sequence < numbers.next && !numbers.skipped.contains(&descriptor.sequence)
        };
        // Operations of an epoch before are over.
        descriptor.epoch < numbers.epoch
            || (descriptor.epoch == numbers.epoch && is_of_this_epoch())
    }
}
