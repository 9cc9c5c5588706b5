//! What moves nothing between members: own parts, and places in a whole.

use std::ops::Range;

use hsdp_comm::Group;

use super::Differentiable;

/// The elements of a whole that are this member's.
pub(super) fn own_part<T: Differentiable>(group: &Group, whole: &[T]) -> Vec<T> {
    let len = whole.len() / group.size();
    whole[own_range(group, len)].to_vec()
}

/// A whole that is zero, but for this member's part.
pub(super) fn placed<T: Differentiable>(group: &Group, part: &[T]) -> Vec<T> {
    let mut whole = vec![T::from_f64(0.0); part.len() * group.size()];
    whole[own_range(group, part.len())].copy_from_slice(part);
    whole
}

/// What the first member keeps, and others give up.
pub(super) fn only_first<T: Differentiable>(group: &Group, values: Vec<T>) -> Vec<T> {
    if group.index() == 0 { values } else { zeros(values.len()) }
}

pub(super) fn zeros<T: Differentiable>(len: usize) -> Vec<T> {
    vec![T::from_f64(0.0); len]
}

/// To whom `member` hands back what it was handed.
pub(super) fn source_of(destinations: &[Option<usize>], member: usize) -> Option<usize> {
    destinations.iter().position(|to| *to == Some(member))
}

fn own_range(group: &Group, len: usize) -> Range<usize> {
    group.index() * len..(group.index() + 1) * len
}
