//! A member's share in a reduction: the factor with which the cotangent of the output comes back to the member.

use hsdp_comm::{Group, Reduction, Tag};

use super::element::Differentiable;
use super::extremes::Holds;
use super::operation::Reducer;
use super::products::Factors;
use crate::error::Error;

/// A member's share of the cotangent of a reduction.
#[derive(Debug)]
pub(super) enum Share<T> {
    /// The share of a linear reduction: a constant factor.
    Linear(Slope),
    /// The product of the other members' elements.
    Others(Factors<T>),
    /// An equal share of the elements whose extreme the member holds.
    Extreme(Holds),
}

/// The derivative of a linear reduction.
#[derive(Clone, Copy, Debug)]
pub(super) enum Slope {
    One,
    /// The slope of an average over this many members: the sum is made first, then divided.
    Over(usize),
    /// The slope of a sum whose elements were first multiplied by this factor.
    Times(f64),
}

impl<T: Differentiable> Share<T> {
    /// Combines the input by `reduce`, and finds this member's share in the result.
    ///
    /// For an extreme, `reduce` returns the whole reduction, not a part of it.
    pub(super) fn of(
        reducer: Reducer,
        members: usize,
        input: Vec<T>,
        reduce: impl FnOnce(Reduction, Vec<T>) -> Result<Option<Vec<T>>, Error>,
    ) -> Result<(Option<Vec<T>>, Self), Error> {
        let linear = |slope| Self::Linear(slope);
        Ok(match reducer {
            Reducer::Sum => (reduce(Reduction::Sum, input)?, linear(Slope::One)),
            Reducer::Avg => (reduce(Reduction::Avg, input)?, linear(Slope::Over(members))),
            Reducer::PreMultiplied(factor) => {
                let slope = Slope::Times(factor);
                let mut input = input;
                slope.apply(&mut input);
                (reduce(Reduction::Sum, input)?, linear(slope))
            }
            Reducer::Product => {
                let factors = Factors(input.clone());
                (reduce(Reduction::Product, input)?, Self::Others(factors))
            }
            Reducer::Min => Self::of_extreme(Reduction::Min, input, reduce)?,
            Reducer::Max => Self::of_extreme(Reduction::Max, input, reduce)?,
        })
    }

    fn of_extreme(
        reduction: Reduction,
        input: Vec<T>,
        reduce: impl FnOnce(Reduction, Vec<T>) -> Result<Option<Vec<T>>, Error>,
    ) -> Result<(Option<Vec<T>>, Self), Error> {
        let extremes = reduce(reduction, input.clone())?;
        let holds = Holds::of(&input, extremes.as_deref().unwrap_or(&[]));
        Ok((extremes, Self::Extreme(holds)))
    }

    /// This member's part of `cotangent`, the cotangent of the whole output, which all members have. Collective, except
    /// where the reduction is linear.
    pub(super) fn of_cotangent(
        &self,
        group: &Group,
        tag: Tag,
        mut cotangent: Vec<T>,
    ) -> Result<Vec<T>, Error> {
        match self {
            Self::Linear(slope) => slope.apply(&mut cotangent),
            Self::Others(factors) => factors.multiply_by_others(group, tag, &mut cotangent)?,
            Self::Extreme(holds) => holds.share(group, tag, &mut cotangent)?,
        }
        Ok(cotangent)
    }
}

impl Slope {
    fn apply<T: Differentiable>(self, values: &mut [T]) {
        match self {
            Self::One | Self::Over(1) => {}
            Self::Over(members) => each(values, |value| value / members as f64),
            Self::Times(factor) => each(values, |value| value * factor),
        }
    }
}

fn each<T: Differentiable>(values: &mut [T], function: impl Fn(f64) -> f64) {
    values.iter_mut().for_each(|value| *value = T::from_f64(function(value.to_f64())));
}
