//! Functions that move nothing between members: own parts, and places in a whole.

use std::ops::Range;

use hsdp_comm::Group;

use super::element::Differentiable;
use crate::error::Error;

/// This member's elements of a whole.
pub(super) fn own_part<T: Differentiable>(group: &Group, whole: &[T]) -> Vec<T> {
    let len = whole.len() / group.size();
    whole[own_range(group, len)].to_vec()
}

/// A whole that is zero, but for this member's part.
///
/// # Errors
/// If there is no memory for the whole.
pub(super) fn placed<T: Differentiable>(group: &Group, part: &[T]) -> Result<Vec<T>, Error> {
    let mut whole = hsdp_kernels::zeros(part.len().saturating_mul(group.size()))?;
    whole[own_range(group, part.len())].copy_from_slice(part);
    Ok(whole)
}

/// The values on the first member, zeros on the others.
pub(super) fn only_first<T: Differentiable>(group: &Group, mut values: Vec<T>) -> Vec<T> {
    if group.index() != 0 {
        values.fill(T::from_f64(0.0));
    }
    values
}

/// The member whose elements `member` received, and to which it sends their cotangents.
pub(super) fn source_of(destinations: &[Option<usize>], member: usize) -> Option<usize> {
    destinations.iter().position(|to| *to == Some(member))
}

fn own_range(group: &Group, len: usize) -> Range<usize> {
    group.index() * len..(group.index() + 1) * len
}
