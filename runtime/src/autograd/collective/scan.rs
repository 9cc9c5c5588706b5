//! Sums over the members up to this one, and over those from this one on.

use hsdp_comm::{Group, Tag};

use super::element::Differentiable;
use super::exchange::Exchange;
use crate::error::Error;

/// The members over which a member's sum goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// The first up to this one.
    UpTo,
    /// This one up to the last: the adjoint of the other.
    From,
}

/// This member's sum. Summed in f64, in the direction's order, and rounded once.
///
/// Each member makes all sums of its own range of elements, with two all_to_alls.
pub(super) fn sums<T: Differentiable>(
    group: &Group,
    tag: Tag,
    mine: &[T],
    direction: Direction,
) -> Result<Vec<T>, Error> {
    let exchange = Exchange::new(group, mine.len());
    let mut everybodys = exchange.to_owners(group, tag, mine)?;
    let (members, len) = (group.size(), everybodys.len() / group.size());
    for element in 0..len {
        let mut sum = 0.0;
        for step in 0..members {
            let member = match direction {
                Direction::UpTo => step,
                Direction::From => members - 1 - step,
            };
            let at = member * len + element;
            sum += everybodys[at].to_f64();
            everybodys[at] = T::from_f64(sum);
        }
    }
    exchange.to_members(group, tag, &everybodys)
}
