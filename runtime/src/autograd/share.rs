//! A member's share in a reduction, and sums over members in their order.
//!
//! Members share work on elements that all have: each owns a range of them, gets all members'
//! elements of that range by an all_to_all, and returns its results by another.

use hsdp_comm::{Group, Reduction, Tag};
use hsdp_sharding::{DType, balanced};

use super::operation::Differentiable;
use crate::error::Error;

/// The factor with which the cotangent of a reduction's output comes back to a member.
#[derive(Debug)]
pub(super) enum ReductionShare<T> {
    /// One, as of a sum and of what is no reduction.
    Whole,
    /// That of an average over this many members: the sum is made first, then divided.
    Over(usize),
    /// The factor by which the member first multiplied its elements.
    Times(f64),
    /// The product of the other members' elements. These are the member's own.
    Others(Vec<T>),
    /// An equal share, of the elements whose extreme the member holds.
    Extreme(Vec<bool>),
}

impl<T: Differentiable> ReductionShare<T> {
    /// Returns the share in `extremes` of a member with this input. Every member with a NaN holds
    /// an extreme that is NaN.
    pub(super) fn of_extremes(input: &[T], extremes: &[T]) -> Self {
        let same = |(mine, extreme): (&T, &T)| {
            let mine = mine.to_f64();
            let extreme = extreme.to_f64();
            mine == extreme || (mine.is_nan() && extreme.is_nan())
        };
        Self::Extreme(input.iter().zip(extremes).map(same).collect())
    }

    /// Turns `cotangents`, those of the whole output, which all members have, into those of this
    /// member's input. Collective for products and extremes.
    pub(super) fn apply(&self, group: &Group, tag: Tag, cotangents: &mut [T]) -> Result<(), Error> {
        match self {
            Self::Whole | Self::Over(1) => {}
            Self::Over(members) => each(cotangents, |value| value / *members as f64),
            Self::Times(factor) => each(cotangents, |value| value * factor),
            // The product of the others may overflow f16 even if the gradient does not.
            Self::Others(mine) => match T::DTYPE {
                DType::F16 | DType::BF16 => by_others::<T, f32>(group, tag, mine, cotangents)?,
                _ => by_others::<T, T>(group, tag, mine, cotangents)?,
            },
            Self::Extreme(holds) => by_holders(group, tag, holds, cotangents)?,
        }
        Ok(())
    }
}

/// Replaces each value by the function of it, computed in f64 and rounded once.
pub(super) fn each<T: Differentiable>(values: &mut [T], function: impl Fn(f64) -> f64) {
    values.iter_mut().for_each(|value| *value = T::from_f64(function(value.to_f64())));
}

/// Multiplies each cotangent by the product of the other members' elements, which travels as `P`.
///
/// Two all_to_alls need memory for one input, where an all_gather would need one for each member.
fn by_others<T: Differentiable, P: Differentiable>(
    group: &Group,
    tag: Tag,
    mine: &[T],
    cotangents: &mut [T],
) -> Result<(), Error> {
    let everybodys = to_owners(group, tag, mine.to_vec())?;
    let others = products_of_others::<T, P>(&everybodys, group.size());
    let others = to_members(group, tag, others, mine.len())?;
    for (cotangent, others) in cotangents.iter_mut().zip(others) {
        *cotangent = T::from_f64(cotangent.to_f64() * others.to_f64());
    }
    Ok(())
}

/// Returns, for each member, the products of the other members' elements. `everybodys` has one
/// range of each, in member order.
///
/// A product that leaves one out is made of the elements before and after that one, never by a
/// division, so zeros need no special case.
fn products_of_others<T: Differentiable, P: Differentiable>(
    everybodys: &[T],
    members: usize,
) -> Vec<P> {
    let len = everybodys.len() / members;
    let mut others = vec![P::from_f64(1.0); everybodys.len()];
    let mut before = vec![1.0; members];
    let mut after = vec![1.0; members];
    for element in 0..len {
        let of = |member: usize| everybodys[member * len + element].to_f64();
        for member in 1..members {
            before[member] = before[member - 1] * of(member - 1);
            let back = members - 1 - member;
            after[back] = after[back + 1] * of(back + 1);
        }
        for member in 0..members {
            others[member * len + element] = P::from_f64(before[member] * after[member]);
        }
    }
    others
}

/// Leaves an equal share of each cotangent to the members that hold the extreme, and 0 to the
/// others.
///
/// Holders are counted in f32, which is exact for up to 2^24 of them; bf16 would count 257 as 256,
/// and f16 2049 as 2048.
fn by_holders<T: Differentiable>(
    group: &Group,
    tag: Tag,
    holds: &[bool],
    cotangents: &mut [T],
) -> Result<(), Error> {
    let mine = holds.iter().map(|holds| f32::from(u8::from(*holds))).collect();
    let holders: Vec<f32> = group.all_reduce(tag, Reduction::Sum, mine)?.wait()?;
    for ((cotangent, holds), holders) in cotangents.iter_mut().zip(holds).zip(holders) {
        let share = if *holds { cotangent.to_f64() / f64::from(holders) } else { 0.0 };
        *cotangent = T::from_f64(share);
    }
    Ok(())
}

/// Returns the sums of the elements of the members up to this one, in their `order`, itself
/// included. Summed in f64, and rounded once.
pub(super) fn scan<T: Differentiable>(
    group: &Group,
    tag: Tag,
    mine: Vec<T>,
    order: impl Iterator<Item = usize> + Clone,
) -> Result<Vec<T>, Error> {
    let all = mine.len();
    let mut everybodys = to_owners(group, tag, mine)?;
    let len = everybodys.len() / group.size();
    for element in 0..len {
        let mut sum = 0.0;
        for member in order.clone() {
            let at = member * len + element;
            sum += everybodys[at].to_f64();
            everybodys[at] = T::from_f64(sum);
        }
    }
    to_members(group, tag, everybodys, all)
}

/// Sends each owner its range of elements that all members have. Returns all members' elements of
/// the range that this member owns, in member order.
fn to_owners<T: Differentiable>(group: &Group, tag: Tag, mine: Vec<T>) -> Result<Vec<T>, Error> {
    let counts = owned(group, mine.len());
    let own = vec![counts[group.index()]; group.size()];
    Ok(group.all_to_all(tag, mine, counts, own)?.wait()?)
}

/// Sends each member the elements that this owner has `made` for it. Returns the `len` elements
/// that the owners have made for this member, in the order of its own.
fn to_members<T: Differentiable>(
    group: &Group,
    tag: Tag,
    made: Vec<T>,
    len: usize,
) -> Result<Vec<T>, Error> {
    let counts = owned(group, len);
    let own = vec![counts[group.index()]; group.size()];
    Ok(group.all_to_all(tag, made, own, counts)?.wait()?)
}

/// Returns how many of `len` elements each member owns.
fn owned(group: &Group, len: usize) -> Vec<usize> {
    (0..group.size()).map(|member| balanced(len, group.size(), member).len()).collect()
}
