//! The moments that Adafactor keeps: of rows and of columns of matrices, and of each element of other parameters.

use std::collections::BTreeMap;

use hsdp_kernels::adafactor::{AdafactorStep, Factored, average_sums};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::{Param, ParamId, UnitId};

use crate::error::Error;
use crate::optimizer::updating::Updating;
use crate::state::context::ErrorSite;

/// The sizes of a parameter as a stack of matrices, its last two dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Sizes {
    /// Returns the sizes of a parameter of at least two dims. `None` for another one.
    pub(super) fn of(param: &Param) -> Option<Self> {
        let [before @ .., rows, columns] = &param.shape[..] else { return None };
        Some(Self { count: before.iter().product(), rows: *rows, columns: *columns })
    }

    /// The rows of all matrices.
    pub(super) fn all_rows(self) -> usize {
        self.count * self.rows
    }

    /// The columns of all matrices.
    pub(super) fn all_columns(self) -> usize {
        self.count * self.columns
    }
}

/// The moments of the rows and of the columns of a parameter, the same on each rank of a shard group.
#[derive(Clone, Debug)]
pub(super) struct Factors {
    pub(super) sizes: Sizes,
    /// `[all rows]` and `[all columns]`.
    pub(super) moments: [Vec<f32>; 2],
}

impl Factors {
    fn zeros(category: Category, sizes: Sizes) -> Result<Self, hsdp_kernels::Error> {
        let _category = memory::scope(category);
        let moments =
            [hsdp_kernels::zeros(sizes.all_rows())?, hsdp_kernels::zeros(sizes.all_columns())?];
        Ok(Self { sizes, moments })
    }

    /// Makes the factors of all parameters of at least two dims that `has` selects.
    pub(super) fn of_all(
        site: ErrorSite<'_>,
        has: impl Fn(ParamId) -> bool,
    ) -> Result<BTreeMap<ParamId, Self>, Error> {
        let params = site.context.plan.spec().params().filter(|(id, _)| has(*id));
        let matrices = params.filter_map(|(id, param)| Some((id, Sizes::of(param)?)));
        let zeros = |(id, sizes): (ParamId, Sizes)| match Self::zeros(Category::Optimizer, sizes) {
            Ok(zeros) => Ok((id, zeros)),
            Err(error) => Err(site.memory(id.unit, error)),
        };
        matrices.map(zeros).collect()
    }

    /// The moments after an update with these sums of squares.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(super) fn moved(
        &self,
        step: &AdafactorStep,
        [rows, columns]: [&[f64]; 2],
    ) -> Result<Self, hsdp_kernels::Error> {
        let mut moved = Self::zeros(Category::Update, self.sizes)?;
        for (into, from) in moved.moments.iter_mut().zip(&self.moments) {
            into.copy_from_slice(from);
        }
        let [of_rows, of_columns] = &mut moved.moments;
        average_sums(step, of_rows, rows, self.sizes.columns);
        average_sums(step, of_columns, columns, self.sizes.rows);
        Ok(moved)
    }

    /// The estimate of variances.
    pub(super) fn estimate(&self, step: &AdafactorStep) -> Factored<'_> {
        let [rows, columns] = &self.moments;
        Factored::new(step, [rows, columns], (self.sizes.rows, self.sizes.columns))
    }
}

/// Sums of all parameters that an optimizer updates, one after the other, in f64.
#[derive(Debug, Default)]
pub(super) struct Sums {
    /// By parameter: the place of its sums.
    places: BTreeMap<ParamId, std::ops::Range<usize>>,
    pub(super) values: Vec<f64>,
}

impl Sums {
    /// Zeros: `len` of them for each parameter that is updated now.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn zeros(
        updating: &Updating<'_>,
        parameters: impl Iterator<Item = ParamId>,
        len: impl Fn(ParamId) -> usize,
    ) -> Result<Self, Error> {
        let mut sums = Self::default();
        let mut at = 0;
        for parameter in parameters.filter(|parameter| updating.updates(*parameter)) {
            let end = at + len(parameter);
            sums.places.insert(parameter, at..end);
            at = end;
        }
        let zeros = {
            let _update = memory::scope(Category::Update);
            hsdp_kernels::zeros(at)
        };
        let first = sums.parameters().next().map_or(UnitId::new(0), |first| first.unit);
        sums.values = zeros.map_err(|error| updating.site().memory(first, error))?;
        Ok(sums)
    }

    pub(super) fn of(&self, parameter: ParamId) -> &[f64] {
        &self.values[self.places[&parameter].clone()]
    }

    pub(super) fn of_mut(&mut self, parameter: ParamId) -> &mut [f64] {
        &mut self.values[self.places[&parameter].clone()]
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = ParamId> {
        self.places.keys().copied()
    }
}
