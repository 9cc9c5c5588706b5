//! The time that a rank computes: by the shapes of its model, kernel by kernel. SIMULATOR.md,
//! "Computation".

mod kernels;
mod shapes;

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use hsdp_sharding::{ByteCount, DType, ModelSpec, Role, UnitId};

pub use self::kernels::Processor;
pub(crate) use self::kernels::update_bytes;
pub use self::shapes::{AttentionScores, AttentionShape, GptShape, Hints, is_attention, is_lookup};

use self::kernels::Kernels;
use self::shapes::{LayerProduct, Tied, UnitShapes};
use crate::{Error, WorkCost};

/// The computation of a model, unit by unit, in the order of the forward.
#[derive(Clone, Debug, PartialEq)]
pub struct Computation {
    units: Vec<UnitShapes>,
    /// Whether each unit has the shapes of the unit before it, and so its costs.
    repeats: Vec<bool>,
    /// The products with aliases of matrices, such as a tied head. They follow the last unit in the
    /// forward.
    tied: Vec<Tied>,
    /// The results of the last product, by token: those of which the loss is computed.
    classes: usize,
    /// The dtype that the unit of the last product declares.
    classes_in: Option<DType>,
}

impl Computation {
    /// Returns the computation of a model.
    ///
    /// A parameter with two dims is the matrix of a product, whichever dim is that of the inputs,
    /// unless it is a lookup. An alias of such a parameter, or of a lookup, is the matrix of one
    /// more product after the last unit, as the head of a model with tied embeddings. All other
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
            Some(Tied { product: LayerProduct::of(&model[id])?, compute })
        });
        let tied: Vec<_> = tied.collect();
        let of_unit = |unit: &UnitShapes| Some((unit.products.last()?.larger(), unit.compute));
        let of_units = units.iter().filter_map(of_unit);
        let of_tied = tied.iter().map(|tied| (tied.product.larger(), tied.compute));
        let (classes, classes_in) = of_units.chain(of_tied).last().unwrap_or_default();
        let repeats = (0..units.len()).map(|it| it > 0 && units[it] == units[it - 1]).collect();
        Ok(Self { units, repeats, tied, classes, classes_in })
    }

    fn products(&self) -> impl Iterator<Item = &LayerProduct> {
        let tied = self.tied.iter().map(|tied| &tied.product);
        self.units.iter().flat_map(|unit| &unit.products).chain(tied)
    }

    /// Returns the cost of the forward of a unit.
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

    /// Returns the cost of the loss and of its gradient, with the forward of tied products.
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

    /// Returns the cost of the backward of a unit, including the part of its forward that is
    /// computed again. The backward of the last unit begins with the backward of tied products.
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

    /// Returns the most bytes of activations at a time: all that the forward of a microbatch keeps,
    /// the results of the last product with their gradient, and what the backward of one unit
    /// computes again.
    #[must_use]
    pub fn most_kept(&self, batch: &Batch) -> ByteCount {
        kept_by_model(&self.units, self.classes, self.classes_in, batch)
    }

    /// Sums the costs of a microbatch: all of its kernels, and all launches of the host.
    #[must_use]
    pub(crate) fn of_microbatch(&self, batch: &Batch, on: &Processor) -> WorkCost {
        let costs = self.forwards(batch, on).into_iter().chain(self.backwards(batch, on));
        let sum = |sum: WorkCost, cost: WorkCost| WorkCost {
            host: sum.host + cost.host,
            device: sum.device + cost.device,
        };
        costs.chain([self.loss(batch, on)]).fold(WorkCost::default(), sum)
    }

    /// Returns the floating-point operations of the forward and the backward of a microbatch,
    /// without what is computed again: for each token two by element of a product's matrix, two for
    /// the gradient of its inputs, and two for that of a matrix that is trained; and those of
    /// attention.
    #[must_use]
    pub fn flops(&self, batch: &Batch) -> f64 {
        let products = self.products();
        let attentions = self.units.iter().filter_map(|unit| unit.attention.as_ref());
        let of_products = products.map(|it| of_product(it, batch));
        let of_attentions = attentions.map(|it| of_attention(it, batch));
        // An empty sum is -0.
        of_products.chain(of_attentions).fold(0.0, |sum, it| sum + it)
    }
}

fn of_product(product: &LayerProduct, batch: &Batch) -> f64 {
    let times = if product.role == Role::Trainable { 3.0 } else { 2.0 };
    2.0 * times * product.elements() * batch.tokens()
}

/// Returns the operations of two products over all scores, and of four for their gradients.
fn of_attention(attention: &AttentionShape, batch: &Batch) -> f64 {
    6.0 * 2.0 * batch.scores(attention) * attention.size as f64
}

// Activations: of a GPT without recomputation, the sizes below are within a tenth of the formula of
// Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022): 34
// bytes for each token and element of the width, and 5 for each score.

/// Elements that are kept by stored score: normalized, dropped out, and which were dropped, in half
/// an element.
const OF_SCORE: f64 = 2.5;
/// Bytes by class and token, beside the result itself: that in f32, and its gradient.
const OF_CLASS: f64 = 8.0;

/// Returns the bytes of all units, and of the results at the end of the forward, or later of what
/// one unit after the other computes again. The results are `classes` a token, in the dtype
/// `compute` if their unit declares one.
fn kept_by_model(
    units: &[UnitShapes],
    classes: usize,
    compute: Option<DType>,
    batch: &Batch,
) -> ByteCount {
    let all: f64 = units.iter().map(|unit| kept_bytes(unit, batch)).sum();
    let whole = Batch { recompute: Recompute::Nothing, ..*batch };
    let again = units.iter().map(|unit| kept_bytes(unit, &whole) - kept_bytes(unit, batch));
    let again = again.fold(0.0, f64::max);
    let results = (OF_CLASS + batch.element(compute)) * classes as f64 * batch.tokens();
    bytes(all + again.max(results))
}

/// Returns the bytes that a unit's forward keeps for its backward. Parameters are not among them.
fn kept_bytes(unit: &UnitShapes, batch: &Batch) -> f64 {
    // The first product may be narrower, such as that of an adapter.
    let inputs = unit.products.iter().map(LayerProduct::smaller).max().unwrap_or(0) as f64;
    let computed = unit.widths() * batch.tokens();
    let stored = unit.attention.filter(|it| it.scores == AttentionScores::Stored);
    let scores = stored.map_or(0.0, |attention| batch.scores(&attention));
    let elements = match batch.recompute {
        Recompute::Nothing => OF_SCORE.mul_add(scores, computed),
        Recompute::Attention => computed,
        Recompute::Unit => inputs * batch.tokens(),
    };
    elements * batch.element(unit.compute)
}

fn bytes(count: f64) -> ByteCount {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "casts of floats saturate, and no count is negative"
    )]
    let count = count.ceil() as u64;
    ByteCount(count)
}

/// The data of a rank's microbatch, and how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// The dtype of activations and full parameters of units that declare none.
    pub dtype: DType,
    /// The part of a forward that the backward computes again.
    pub recompute: Recompute,
}

impl Batch {
    const fn tokens(&self) -> f64 {
        self.sequences as f64 * self.context as f64
    }

    /// Bytes of an element of activations, in a unit that declares the dtype `compute`.
    fn element(&self, compute: Option<DType>) -> f64 {
        compute.unwrap_or(self.dtype).size_bytes() as f64
    }
}

/// The part of a unit's forward that its backward computes again, instead of keeping it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Nothing.
    #[default]
    Nothing,
    /// Attention from queries, keys and values on: its scores take the most memory, and few
    /// operations.
    Attention,
    /// All of it: only the inputs of units are kept.
    Unit,
}

impl Recompute {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nothing, Self::Attention, Self::Unit];

    /// Returns its name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Attention => "attention",
            Self::Unit => "unit",
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Recompute {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let unknown = || Error::Computation {
            problem: format!("{text:?} cannot be recomputed: expected nothing, attention or unit"),
        };
        Self::ALL.into_iter().find(|it| it.name() == text).ok_or_else(unknown)
    }
}
