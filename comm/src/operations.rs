//! The comparison of operations that NCCL carries between processes. No message carries their
//! descriptors: each rank counts and hashes them, and the ranks compare the hashes.

use std::sync::Arc;

use crate::comparison::gathered;
use crate::handle::Backend;
use crate::remote::find_difference;
use crate::rolling::GroupMembership;
use crate::{Channel, Descriptor, Error, Group, World};

/// # Operations that NCCL carries between processes
impl World {
    /// This rank's share of a check: if the members of each group have issued the same operations,
    /// the sum of the words of all ranks is 0, as a number of 128 bits (the low half comes first)
    /// that wraps around. Otherwise it is not 0, but for one case in about 2^128. Not collective.
    ///
    /// All ranks pass the groups that they would pass to
    /// [`compare_operations`](Self::compare_operations). Only operations that NCCL carries between
    /// processes count. The word of a world without them is 0.
    ///
    /// Waits until the steps that this rank has given up are drained on its device, for a deadline
    /// at the most: then the world ends, and so does the exchange of the words.
    #[must_use]
    pub fn operations_word(&self, groups: &[&Group]) -> [u64; 2] {
        let _end = self.handle().nccl.await_drained(&self.handle().own);
        let places = groups.iter().map(|group| group.membership());
        let word = self.handle().own.record.rolling.word(places);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        [word as u64, (word >> 64) as u64]
    }

    /// Compares the operations of the members of each group, as far as NCCL carries them between
    /// processes. A disagreement ends the world.
    ///
    /// **Collective** over the world, on the control channel: all ranks pass the same number of
    /// groups, and the groups at one position of the list together cover all ranks, as the groups
    /// of an axis of a mesh do.
    ///
    /// # Errors
    /// [`WorldError::Mismatch`](crate::WorldError) on all ranks, with the calls of the members of a
    /// group about the first operation that differs; the errors of any collective.
    pub fn compare_operations(&self, groups: &[&Group]) -> Result<(), Error> {
        let rolling = &self.handle().own.record.rolling;
        groups.iter().for_each(|group| rolling.know(group.id()));
        let own = self.operations_word(groups).to_vec();
        let all = gathered(&self.world_group(Channel::Control), own)?;
        let words = all.as_chunks().0.iter();
        let words = words.map(|[low, high]| u128::from(*low) | u128::from(*high) << 64);
        // The other ranks of a counting world issue what this one does.
        if words.fold(0, u128::wrapping_add) == 0 || self.handle().backend == Backend::Counting {
            return Ok(());
        }
        let own = &self.handle().own;
        let told = own.endpoint().map(|endpoint| endpoint.tell_difference());
        if let Some(Err(silent)) = told {
            own.core.end_unjudged(silent);
        }
        let end = own.early_ends().world_end();
        Err(end.unwrap_or_else(|| own.core.end(find_difference(&own.core.state.records))))
    }
}

impl Group {
    fn membership(&self) -> GroupMembership {
        GroupMembership { group: self.id(), slot: self.index(), size: self.size() }
    }
}

/// For tests: counts an operation as one that NCCL carries between processes.
pub fn note_operation(world: &World, descriptor: &Arc<Descriptor>) {
    world.handle().own.record.rolling.note(descriptor, 0);
}

#[cfg(test)]
mod tests;
