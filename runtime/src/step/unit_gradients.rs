//! The gradients of a unit in a microbatch.

use std::sync::Arc;

use hsdp_kernels::GradientValues;
use hsdp_sharding::step::Refused;
use hsdp_sharding::{Role, UnitId};

use crate::error::Error;
use crate::state::context::Context;

/// The gradients of one unit in one microbatch, for [`Pass::reduce`](crate::Pass::reduce): one
/// entry for each parameter of the unit, in the order of its declaration.
///
/// An entry is the gradient of the full parameter: as many elements as its declared shape has, flat
/// and row-major. `Vec<f32>`, `Vec<f16>` and `Vec<bf16>` are gradients, and a tensor of another
/// type is one if it implements [`GradientValues`]. They are read in place, without a copy, and
/// dropped when the reduction is complete. A parameter that is frozen, or that the loss does not
/// use, has an entry without a gradient. Where a trainable parameter has none, zeros are summed.
///
/// ```
/// use hsdp::UnitGradients;
///
/// // A weight of shape [2, 3] and its bias.
/// let (weight, bias) = (vec![0.5_f32; 6], vec![1.0_f32; 2]);
/// let both = UnitGradients::of([weight.clone(), bias]);
/// let frozen_bias = UnitGradients::new().with(weight).without();
/// # drop((both, frozen_bias));
/// ```
///
/// An adapter, which has gradients of several types or shares them, collects its entries:
///
/// ```
/// use std::sync::Arc;
/// use hsdp::{GradientValues, UnitGradients};
///
/// let shared: Arc<dyn GradientValues> = Arc::new(vec![0.5_f32; 6]);
/// let gradients: UnitGradients = [Some(shared), None].into_iter().collect();
/// # drop(gradients);
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct UnitGradients {
    pub(crate) entries: Vec<Option<Arc<dyn GradientValues>>>,
}

impl UnitGradients {
    /// Returns the gradients of a unit without parameters, to which [`with`](Self::with) and
    /// [`without`](Self::without) add entries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the gradients of a unit that has one for each of its parameters.
    pub fn of<G: GradientValues + 'static>(gradients: impl IntoIterator<Item = G>) -> Self {
        gradients.into_iter().fold(Self::new(), Self::with)
    }

    /// Adds the gradient of the next parameter.
    pub fn with(mut self, gradient: impl GradientValues + 'static) -> Self {
        self.entries.push(Some(Arc::new(gradient)));
        self
    }

    /// Adds an entry without a gradient: the next parameter is frozen or unused.
    pub fn without(mut self) -> Self {
        self.entries.push(None);
        self
    }

    /// Checks that the model has the unit, and that these are its gradients: one entry for each
    /// parameter, each gradient of the parameter's size, and none for frozen ones.
    pub(crate) fn check(&self, context: &Context, step: u64, unit: UnitId) -> Result<(), Error> {
        let units = context.plan.spec().units().len();
        if unit.index() >= units {
            let what = Refused::NoSuchUnit { unit, units }.to_string();
            return Err(context.misuse("reduce", step, what));
        }
        let spec = &context.plan.spec()[unit];
        if self.entries.len() != spec.params.len() {
            let what = format!(
                "unit {} has {} parameters, {} gradients were given",
                spec.name,
                spec.params.len(),
                self.entries.len()
            );
            return Err(context.misuse("reduce", step, what));
        }
        let slots = context.plan.layout(unit).params();
        for ((slot, parameter), gradient) in slots.iter().zip(&spec.params).zip(&self.entries) {
            let Some(gradient) = gradient else { continue };
            if parameter.role == Role::Frozen {
                let what =
                    format!("parameter {} is frozen and was given a gradient", &parameter.name);
                return Err(context.misuse("reduce", step, what));
            }
            if gradient.len() != slot.len {
                return Err(Error::Size {
                    operation: "reduce",
                    name: parameter.name.clone(),
                    rank: context.rank(),
                    got: gradient.len(),
                    want: slot.len,
                });
            }
        }
        Ok(())
    }
}

/// Collects one entry for each parameter: a gradient that may be shared, or `None` for a parameter
/// that is frozen or unused.
impl FromIterator<Option<Arc<dyn GradientValues>>> for UnitGradients {
    fn from_iter<I: IntoIterator<Item = Option<Arc<dyn GradientValues>>>>(entries: I) -> Self {
        Self { entries: entries.into_iter().collect() }
    }
}
