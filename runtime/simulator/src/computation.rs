//! The time that a rank computes: by the shapes of its model, kernel by kernel. SIMULATOR.md, "Computation".

mod batch;
mod gpt;
mod kept;
mod kernels;
mod phases;
mod processor;
mod shapes;
mod totals;

#[cfg(test)]
mod tests;

use hsdp_sharding::{ByteCount, DType, ModelSpec, UnitId};

pub use self::batch::{Batch, Recompute};
pub use self::gpt::Gpt;
pub(crate) use self::phases::update_bytes;
pub use self::processor::Processor;
pub use self::shapes::{Attention, Hints, Scores, is_attention, is_lookup};

use self::kernels::Kernels;
use self::shapes::{Product, Tied, UnitShapes};
use crate::{Error, WorkCost};

/// The computation of a model, unit by unit, in the order of the forward.
#[derive(Clone, Debug, PartialEq)]
pub struct Computation {
    units: Vec<UnitShapes>,
    /// Whether each unit has the shapes of the unit before it, and so its costs.
    repeats: Vec<bool>,
    /// The products with aliases of matrices, such as a tied head. They follow the last unit in the forward.
    tied: Vec<Tied>,
    /// The results of the last product, by token: those of which the loss is computed.
    classes: usize,
    /// The dtype that the unit of the last product declares.
    classes_in: Option<DType>,
}

impl Computation {
    /// The computation of a model.
    ///
    /// A parameter with two dims is the matrix of a product, whichever dim is that of the inputs, unless it is a lookup. An alias of such a
    /// parameter, or of a lookup, is the matrix of one more product after the last unit, as the head of a model with tied embeddings. All other
    /// parameters cost only the time to add up their gradients.
    ///
    /// # Errors
    /// Errors of [`ModelSpec::validate`], and [`Error::Computation`] if an attention has no heads,
    /// or heads of size 0.
    pub fn of(model: &ModelSpec, hints: &Hints<'_>) -> Result<Self, Error> {
        model.validate()?;
        let units = model.units().iter().map(|unit| UnitShapes::of(unit, hints));
        let units = units.collect::<Result<Vec<_>, _>>()?;
        let targets = model.ties().filter_map(|(alias, _)| model.find(alias));
        let tied = targets.filter_map(|id| {
            let compute = model[id.unit].compute_dtype;
            Some(Tied { product: Product::of(&model[id])?, compute })
        });
        let tied: Vec<_> = tied.collect();
        let of_unit = |unit: &UnitShapes| Some((unit.products.last()?.larger(), unit.compute));
        let of_units = units.iter().filter_map(of_unit);
        let of_tied = tied.iter().map(|tied| (tied.product.larger(), tied.compute));
        let (classes, classes_in) = of_units.chain(of_tied).last().unwrap_or_default();
        let repeats = (0..units.len()).map(|it| it > 0 && units[it] == units[it - 1]).collect();
        Ok(Self { units, repeats, tied, classes, classes_in })
    }

    fn products(&self) -> impl Iterator<Item = &Product> {
        let tied = self.tied.iter().map(|tied| &tied.product);
        self.units.iter().flat_map(|unit| &unit.products).chain(tied)
    }

    /// The cost of the forward of a unit.
    ///
    /// # Panics
    /// If the model has no such unit, or no training computes in the dtype of the batch. The other
    /// methods panic alike.
    #[must_use]
    pub fn forward(&self, unit: UnitId, batch: &Batch, on: &Processor) -> WorkCost {
        let unit = &self.units[unit.index()];
        let mut kernels = Kernels::new(on, unit.compute.unwrap_or(batch.dtype));
        kernels.forward(unit, batch);
        kernels.cost()
    }

    /// The cost of the loss and of its gradient, with the forward of tied products.
    #[must_use]
    pub fn loss(&self, batch: &Batch, on: &Processor) -> WorkCost {
        let mut kernels = Kernels::new(on, batch.dtype);
        for Tied { product, compute } in &self.tied {
            kernels.compute_in(compute.unwrap_or(batch.dtype));
            kernels.product_forward(product, batch);
        }
        kernels.loss(self.classes, batch);
        kernels.cost()
    }

    /// The cost of the backward of a unit, with what is computed again of its forward. That of the last unit begins with the backward of tied
    /// products.
    #[must_use]
    pub fn backward(&self, unit: UnitId, batch: &Batch, on: &Processor) -> WorkCost {
        let mut kernels = Kernels::new(on, batch.dtype);
        if unit.index() + 1 == self.units.len() {
            for Tied { product, compute } in &self.tied {
                kernels.compute_in(compute.unwrap_or(batch.dtype));
                kernels.product_backward(product, batch);
            }
        }
        let unit = &self.units[unit.index()];
        kernels.compute_in(unit.compute.unwrap_or(batch.dtype));
        kernels.backward(unit, batch);
        kernels.cost()
    }

    /// Returns the cost of each unit's forward.
    pub(crate) fn forwards(&self, batch: &Batch, on: &Processor) -> Vec<WorkCost> {
        self.of_units(|unit| self.forward(unit, batch, on))
    }

    /// Returns the cost of each unit's backward.
    pub(crate) fn backwards(&self, batch: &Batch, on: &Processor) -> Vec<WorkCost> {
        let mut costs = self.of_units(|unit| self.backward(unit, batch, on));
        // Tied products are in that of the last unit alone.
        if let (Some(last), [.., true]) = (costs.last_mut(), &*self.repeats) {
            *last = self.backward(UnitId::new(self.units.len() - 1), batch, on);
        }
        costs
    }

    /// Returns the costs of all units. A unit with the shapes of the one before has its cost.
    fn of_units(&self, cost: impl Fn(UnitId) -> WorkCost) -> Vec<WorkCost> {
        let mut last = WorkCost::default();
        let of_unit = |(unit, repeats): (usize, &bool)| {
            if !repeats {
                last = cost(UnitId::new(unit));
            }
            last
        };
        self.repeats.iter().enumerate().map(of_unit).collect()
    }

    /// The bytes that a unit's forward keeps for its backward in a microbatch. Parameters are not among them.
    #[must_use]
    pub fn kept(&self, unit: UnitId, batch: &Batch) -> ByteCount {
        kept::of_unit(&self.units[unit.index()], batch)
    }

    /// The most bytes of activations at a time: all that the forward of a microbatch keeps, the results of the last product with their
    /// gradient, and what the backward of one unit computes again.
    #[must_use]
    pub fn most_kept(&self, batch: &Batch) -> ByteCount {
        kept::of_model(&self.units, (self.classes, self.classes_in), batch)
    }
}
