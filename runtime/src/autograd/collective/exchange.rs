//! Sends elements that all members have to the owners of their ranges, and back.

use std::ops::Range;

use hsdp_comm::{Group, Tag};
use hsdp_sharding::balanced;

use super::element::Differentiable;
use crate::error::Error;

/// The ranges of elements that all members have, and the member that owns each range.
pub(super) struct Exchange {
    /// The ranges of the owners, by member.
    owned: Vec<Range<usize>>,
    own: usize,
}

impl Exchange {
    pub(super) fn new(group: &Group, len: usize) -> Self {
        let size = group.size();
        let owned = (0..size).map(|member| balanced(len, size, member)).collect();
        Self { owned, own: group.index() }
    }

    /// All members' elements of the range that this member owns, in member order.
    pub(super) fn to_owners<T: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        mine: &[T],
    ) -> Result<Vec<T>, Error> {
        Ok(group.all_to_all(tag, mine.to_vec(), self.counts(), self.own_counts())?.wait()?)
    }

    /// The elements that the owners have made for this member, in the order of its own elements.
    pub(super) fn to_members<T: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        made: &[T],
    ) -> Result<Vec<T>, Error> {
        Ok(group.all_to_all(tag, made.to_vec(), self.own_counts(), self.counts())?.wait()?)
    }

    fn counts(&self) -> Vec<usize> {
        self.owned.iter().map(Range::len).collect()
    }

    fn own_counts(&self) -> Vec<usize> {
        vec![self.owned[self.own].len(); self.owned.len()]
    }
}
