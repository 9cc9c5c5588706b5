//! The members that hold the smallest or the largest element, and the gradient that they share.

use hsdp_comm::{Group, Reduction, Tag};

use super::element::Differentiable;
use crate::error::Error;

/// For each element, whether this member holds the extreme.
#[derive(Debug)]
pub(super) struct Holds(Vec<bool>);

impl Holds {
    /// Every member with a NaN holds an extreme that is NaN.
    pub(super) fn of<T: Differentiable>(input: &[T], extremes: &[T]) -> Self {
        let same = |(mine, extreme): (&T, &T)| {
            let (mine, extreme) = (mine.to_f64(), extreme.to_f64());
            mine == extreme || (mine.is_nan() && extreme.is_nan())
        };
        Self(input.iter().zip(extremes).map(same).collect())
    }

    /// Leaves an equal share of each cotangent to the members that hold the extreme, and 0 to the others.
    ///
    /// Holders are counted in f32, which is exact for up to 2^24 of them; bf16 would count 257 as 256, and f16 2049 as 2048.
    pub(super) fn share<T: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        cotangents: &mut [T],
    ) -> Result<(), Error> {
        let mine = self.0.iter().map(|holds| f32::from(u8::from(*holds))).collect();
        let holders: Vec<f32> = group.all_reduce(tag, Reduction::Sum, mine)?.wait()?;
        for ((cotangent, holds), holders) in cotangents.iter_mut().zip(&self.0).zip(holders) {
            let share = if *holds { cotangent.to_f64() / f64::from(holders) } else { 0.0 };
            *cotangent = T::from_f64(share);
        }
        Ok(())
    }
}
