//! The comparison of operations: the first one about which the members of a group disagree.

use std::sync::Arc;

use hsdp_sharding::Rank;

use crate::comparison::{exchanged, gathered};
use crate::mismatch::{MismatchRow, Wanted};
use crate::remote::{rows_bytes, rows_of};
use crate::rolling::{Entry, Membership, RollingHash, hash_after, words};
use crate::{Channel, Descriptor, Error, Group, Mismatch, World};

/// # Operations that NCCL carries between processes
///
/// No message carries the descriptors of these operations. Each rank counts and hashes them, and the ranks compare the hashes.
impl World {
    /// This rank's share of a check: if the members of each group have issued the same operations, the sum of the words of
    /// all ranks is 0, as a number of 128 bits (the low half comes first) that wraps around. Otherwise it is not 0, but for
    /// one case in about 2^128. Not collective.
    ///
    /// All ranks pass the groups that they would pass to [`compare_operations`](Self::compare_operations). Only operations that
    /// NCCL carries between processes count. The word of a world without them is 0.
    #[must_use]
    pub fn operations_word(&self, groups: &[&Group]) -> [u64; 2] {
        let places = groups.iter().map(|group| group.membership());
        words(self.handle().record.rolling.word(places).to_le_bytes())
    }

    /// Finds the first operation about which the members of a group disagree, among the operations that NCCL carries between
    /// processes. A disagreement ends the world.
    ///
    /// **Collective** over the world, on the control channel: all ranks pass the same number of groups, and the groups at
    /// one position of the list together cover all ranks, as the groups of an axis of a mesh do.
    ///
    /// # Errors
    /// [`Error::CollectiveMismatch`] on all ranks, with the calls of the members of the first group that differs; the
    /// errors of any collective.
    pub fn compare_operations(&self, groups: &[&Group]) -> Result<(), Error> {
        let rolling = &self.handle().record.rolling;
        let kept = groups.iter().map(|group| rolling.entries_from(group.id(), 0)).collect();
        let comparison =
            Comparison { rank: self.rank(), control: self.world_group(Channel::Control), kept };
        let ids: Vec<_> = groups.iter().map(|group| group.id().get()).collect();
        match comparison.table(&ids)? {
            None => Ok(()),
            Some(table) => {
                let error = Error::CollectiveMismatch { table: Arc::new(table) };
                Err(self.handle().end(error))
            }
        }
    }

    /// For tests: counts an operation as one that NCCL carries between processes.
    #[doc(hidden)]
    pub fn note_operation(&self, descriptor: &Arc<Descriptor>) {
        self.handle().record.rolling.note(descriptor, 0);
    }
}

impl Group {
    fn membership(&self) -> Membership {
        Membership { group: self.id(), slot: self.index(), size: self.size() }
    }
}

/// The operations that a rank brings to a comparison.
struct Comparison {
    rank: Rank,
    control: Group,
    /// The entries that this rank keeps, by the position of their group in the list.
    kept: Vec<Vec<Entry>>,
}

/// What a rank says of one of its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    group: u64,
    count: u64,
    /// The hash after `count` operations.
    hash: [u64; 2],
    /// The lowest number of operations for which the hash is known.
    oldest: u64,
}

/// The group that is looked at.
struct Differing {
    /// In the list.
    position: usize,
    members: Vec<usize>,
    /// Numbers of operations for which all members know their hash: from the first to the last.
    known: [u64; 2],
}

impl Comparison {
    fn table(&self, ids: &[u64]) -> Result<Option<Mismatch>, Error> {
        let said = ids.iter().zip(&self.kept).flat_map(|(id, kept)| Said::of(*id, kept).words());
        let all = gathered(&self.control, said.collect())?;
        let all: Vec<_> = all.as_chunks().0.iter().map(Said::read).collect();
        let Some(differing) = Differing::first(&all, ids.len()) else { return Ok(None) };
        let differ_after = self.first_difference(&differing)?;
        let index = differ_after.saturating_sub(1);
        let rows = self.rows(&differing, index)?;
        Ok(Some(Mismatch { problem: problem(&rows, differing.is_past(differ_after)), rows }))
    }

    /// The lowest known number of operations after which the members differ, by bisection; one more than are known if they
    /// agree until then, and one has issued more than another.
    fn first_difference(&self, differing: &Differing) -> Result<u64, Error> {
        let [mut first, mut end] = [differing.known[0], differing.known[1] + 1];
        while first < end {
            let middle = first.midpoint(end);
            let own = hash_after(middle, &self.kept[differing.position]);
            let all = gathered(&self.control, words(own.unwrap_or_default()).to_vec())?;
            let hashes: Vec<[u64; 2]> = all.as_chunks().0.to_vec();
            let reference = hashes[differing.members[0]];
            match differing.members.iter().all(|member| hashes[*member] == reference) {
                true => first = middle + 1,
                false => end = middle,
            }
        }
        Ok(first)
    }

    /// The calls of the members at number `index`, in rank order.
    fn rows(&self, differing: &Differing, index: u64) -> Result<Vec<MismatchRow>, Error> {
        let own = differing.members.contains(&self.rank.index());
        let own = own.then(|| self.row(&self.kept[differing.position], index));
        let said = exchanged(&self.control, &rows_bytes(own.as_slice()))?;
        let rows = said.iter().map(|said| rows_of(said).expect("a rank of this version wrote it"));
        Ok(rows.flatten().collect())
    }

    fn row(&self, kept: &[Entry], index: u64) -> MismatchRow {
        let called = |entry: &Entry| entry.descriptor.clone();
        let at = kept.iter().find(|entry| entry.index == index).and_then(called);
        let wanted = match at {
            Some(descriptor) => Wanted::Arrived(descriptor),
            None => Wanted::Missing(kept.iter().rev().find_map(called)),
        };
        MismatchRow { rank: self.rank, wanted }
    }
}

impl Said {
    fn of(group: u64, kept: &[Entry]) -> Self {
        let (first, last) = (kept.first(), kept.last());
        // Before the first operation of all, the hash is known, too.
        let oldest = first.map_or(0, |first| if first.index == 0 { 0 } else { first.index + 1 });
        Self {
            group,
            count: last.map_or(0, |last| last.index + 1),
            hash: words(last.map_or_else(RollingHash::default, |last| last.hash)),
            oldest,
        }
    }

    fn words(self) -> [u64; 5] {
        [self.group, self.count, self.hash[0], self.hash[1], self.oldest]
    }

    fn read(&[group, count, low, high, oldest]: &[u64; 5]) -> Self {
        Self { group, count, hash: [low, high], oldest }
    }
}

impl Differing {
    /// The first group whose members differ: by its position in the list of `groups` groups, then by its first rank.
    fn first(all: &[Said], groups: usize) -> Option<Self> {
        (0..groups).find_map(|position| {
            let said: Vec<_> = all.iter().skip(position).step_by(groups).copied().collect();
            let differs = |it: &&Said| said.iter().any(|other| other.differs_from(it));
            let one = *said.iter().find(differs)?;
            let is_member = |rank: &usize| said[*rank].group == one.group;
            let members: Vec<_> = (0..said.len()).filter(is_member).collect();
            let of_members = || members.iter().map(|rank| said[*rank]);
            let last = of_members().map(|said| said.count).min()?;
            let first = of_members().map(|said| said.oldest).max()?.min(last);
            Some(Self { position, known: [first, last], members })
        })
    }

    /// Whether members may have differed before the first number that all know.
    fn is_past(&self, differ_after: u64) -> bool {
        differ_after > 0 && differ_after == self.known[0]
    }
}

impl Said {
    fn differs_from(&self, other: &Self) -> bool {
        self.group == other.group && (self.count, self.hash) != (other.count, other.hash)
    }
}

fn problem(rows: &[MismatchRow], is_past: bool) -> String {
    let called: Vec<_> = rows.iter().filter_map(MismatchRow::arrived).collect();
    let Some(first) = called.first() else {
        return "ranks disagree about operations that no member keeps any more".to_owned();
    };
    let place = first.place();
    let agree = |other: &&Arc<Descriptor>| other.agrees_with(first) && other.place() == place;
    if is_past {
        format!("ranks disagree about an operation before {place}, the first that all keep")
    } else if called.len() == rows.len() && called.iter().all(agree) {
        format!("ranks have different layouts of one unit, or call different functions, in {place}")
    } else {
        format!("ranks disagree about {place}")
    }
}

impl MismatchRow {
    fn arrived(&self) -> Option<&Arc<Descriptor>> {
        match &self.wanted {
            Wanted::Arrived(descriptor) => Some(descriptor),
            Wanted::Missing(_) | Wanted::Waiting { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests;
