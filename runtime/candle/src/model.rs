//! The traits that a model is written against. They provide units by name, and their parameters by
//! name.
//!
//! A model that uses these traits is ordinary candle code. [`Pass`](crate::Pass) runs it
//! sharded, and [`Plain`](crate::Plain) runs it on whole [`Var`](candle_core::Var)s.

use std::array;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use hsdp_sharding::ModelSpec;

use crate::statistics::BatchStatistics;
use crate::unit::PassKind;

/// Provides a unit's forward with its parameters.
///
/// Layers whose constructors take a `VarBuilder` read them through
/// [`var_builder`](crate::var_builder).
pub trait Parameters: Sync {
    /// Returns the parameter with this name or alias, in full, in the declared shape and the
    /// compute dtype of the unit that holds it.
    ///
    /// Two calls with one name return the same tensor, so its gradient comes in one piece.
    ///
    /// # Errors
    /// If the model has no such parameter, or it cannot be gathered.
    fn get(&self, name: &str) -> Result<Tensor>;

    /// Returns a [buffer](hsdp_sharding::Param::buffer), in the declared shape and in f32: as this
    /// rank has last written it in the step, or as it was before the step.
    ///
    /// # Errors
    /// If the model has no such buffer, or the microbatch is over.
    fn buffer(&self, name: &str) -> Result<Tensor>;

    /// Writes a buffer, which later microbatches of the step read. It counts when the step has
    /// finished; a step that is dropped or skipped leaves the buffer as it was. The second run of a
    /// [recomputed](UnitsExt::recomputed) unit writes nothing.
    ///
    /// # Errors
    /// If the model has no such buffer, `value` has another shape, or the forward is an evaluation.
    fn write_buffer(&self, name: &str, value: &Tensor) -> Result<()>;

    /// Returns whether the forward is a part of training, for layers that compute another function
    /// in an evaluation.
    ///
    /// # Errors
    /// On a [`Plain`](crate::Plain) whose mode was not set.
    fn mode(&self) -> Result<ForwardMode>;

    /// Returns the sums over all ranks that the layer `name`
    /// [declares](hsdp_sharding::Unit::batch_norm); `None` if no unit declares any.
    fn statistics(&self, name: &str) -> Option<BatchStatistics>;

    /// Returns the description of the model, with the declared shape of each parameter.
    fn spec(&self) -> &ModelSpec;

    /// Returns the compute dtype of the unit whose forward reads. Its own parameters have that
    /// dtype.
    fn dtype(&self) -> DType;

    /// Returns the device of all parameters.
    fn device(&self) -> &Device;
}

/// Whether a forward is a part of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardMode {
    /// The forward of a step.
    Training,
    /// The forward of an evaluation.
    Evaluation,
}

impl From<PassKind> for ForwardMode {
    fn from(kind: PassKind) -> Self {
        match kind {
            PassKind::Training => Self::Training,
            PassKind::Evaluation | PassKind::EvaluationWithBackward => Self::Evaluation,
        }
    }
}

/// A unit's forward: from its parameters and its inputs to its output.
pub type Forward<'a> = Box<dyn FnOnce(&dyn Parameters, &[Tensor]) -> Result<Tensor> + 'a>;

/// A unit's forward that may run twice, in the forward and again in the backward. Both outputs must
/// have the same bits.
pub type RepeatableForward =
    Arc<dyn Fn(&dyn Parameters, &[Tensor]) -> Result<Tensor> + Send + Sync>;

/// Runs a model unit by unit. A model calls the methods of [`UnitsExt`], which every implementation
/// has.
pub trait Units {
    /// Runs the unit `name` for [`UnitsExt::unit`]. `forward` gets as many inputs as there are
    /// `inputs`, in their order.
    ///
    /// # Errors
    /// The errors of [`UnitsExt::unit`].
    fn run_unit(&self, name: &str, inputs: &[Tensor], forward: Forward<'_>) -> Result<Tensor>;

    /// Runs the unit `name` for [`UnitsExt::recomputed`]. This default runs `forward` once.
    ///
    /// # Errors
    /// The errors of [`UnitsExt::recomputed`].
    fn run_recomputed(
        &self,
        name: &str,
        inputs: &[Tensor],
        forward: RepeatableForward,
    ) -> Result<Tensor> {
        self.run_unit(name, inputs, Box::new(move |parameters, inputs| forward(parameters, inputs)))
    }

    /// Casts the output of the model to its output dtype. Without one, the output is unchanged.
    ///
    /// # Errors
    /// If candle cannot cast to that dtype.
    fn output(&self, tensor: &Tensor) -> Result<Tensor> {
        Ok(tensor.clone())
    }
}

/// The calls with which a model runs its units, on a [`Pass`](crate::Pass), on
/// [`Plain`](crate::Plain) and on any other [`Units`].
pub trait UnitsExt: Units {
    /// Runs `forward` with the parameters of the unit `name`, which may be freed when it returns.
    /// If any unit of the model [declares](hsdp_sharding::Unit::compute_in) its compute dtype, each
    /// unit gets its float inputs in its own compute dtype; otherwise inputs are not cast. The
    /// output keeps the dtype that `forward` gives it.
    ///
    /// `inputs` is one tensor, or an array of several: the output of the unit before and a skip
    /// connection, say, or the two sequences of a cross attention and a mask. Gradients flow back
    /// through each float input that has a history. Integers, as ids and masks, are not cast and
    /// get no gradient. [`Pass::backward`](crate::Pass::backward) warns of an input that has a
    /// history and that `forward` cuts off. Detach such an input before the unit.
    ///
    /// ```
    /// # use candle_core::{Result, Tensor};
    /// # use hsdp_candle::prelude::*;
    /// fn forward(units: &dyn Units, x: &Tensor) -> Result<Tensor> {
    ///     let skip = units.unit("down", x, |p, x| x.matmul(&p.get("down.w")?)?.tanh())?;
    ///     let x = units.unit("middle", &skip, |p, x| x.matmul(&p.get("middle.w")?)?.tanh())?;
    ///     units.unit("up", [&x, &skip], |p, [x, skip]| {
    ///         Tensor::cat(&[x, skip], 1)?.matmul(&p.get("up.w")?)
    ///     })
    /// }
    /// ```
    ///
    /// A value computed from a parameter must leave the unit as its output: on a
    /// [`Pass`](crate::Pass) the parameters are freed when this method returns, and an op that
    /// reads one fails with [`Error::Resharded`](crate::Error::Resharded).
    ///
    /// A pass waits for a gather over the shard group, which all its ranks issue in the plan's
    /// order. If it fails, the other ranks get its error, with this rank and the unit, when the
    /// step is dropped.
    ///
    /// # Errors
    /// [`DeclarationError::UnknownUnit`](crate::DeclarationError::UnknownUnit), the error that
    /// `forward` returns, and on a pass
    /// [`DeclarationError::UnknownParameter`](crate::DeclarationError::UnknownParameter);
    /// [`Error::Freed`](crate::Error::Freed) if a unit that is not kept is needed a second time;
    /// [`Error::PassOver`](crate::Error::PassOver) after the end of the pass;
    /// [`Error::Runtime`](crate::Error::Runtime) if a gather fails. `?` makes such an error of
    /// candle's, and the other way round.
    fn unit<I: UnitInputs>(
        &self,
        name: &str,
        inputs: I,
        forward: impl FnOnce(&dyn Parameters, I::Lent<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let forward =
            |parameters: &dyn Parameters, lent: &[Tensor]| forward(parameters, I::lend(lent));
        self.run_unit(name, &inputs.tensors(), Box::new(forward))
    }

    /// Runs `forward` as [`unit`](Self::unit) does. On a [`Pass`](crate::Pass) this keeps none of
    /// the tensors that it makes, except its output: the backward gathers the unit, as it does for
    /// `unit`, and runs `forward` again for its gradients (activation checkpointing). So each such
    /// unit computes its forward twice. The collectives are those of `unit`. An evaluation, and
    /// [`Plain`](crate::Plain), run `forward` once.
    ///
    /// Only one unit at a time has its activations in memory. The second run keeps them for its
    /// backward. The first run keeps them until `forward` returns, to find tensors that leave the
    /// unit beside its output.
    ///
    /// `forward` must be repeatable: its second output must have the bits of the first. Tensors
    /// that it captures must have no gradients, which would be lost: an output that depends on a
    /// captured variable, or on a tensor computed from parameters, is an error. A loss is an error,
    /// too, if it depends on a tensor that left `forward` beside its output. Detach a tensor that
    /// is kept for a log, or it keeps the tensors of the first run. Both runs change the state that
    /// `forward` changes. An input that is a view is copied first, to be contiguous.
    ///
    /// Losses and gradients have the bits that they have with `unit`, with one exception: if candle
    /// adds more than two numbers, and the graph of the second run cuts this sum, another order may
    /// round differently. This concerns the gradient of a parameter that this unit reads more than
    /// once and another unit reads too, and the gradient of an input that is also used outside of
    /// the unit, or given to it twice.
    ///
    /// # Errors
    /// The errors of [`unit`](Self::unit);
    /// [`LostGradients::History`](crate::LostGradients::History) if the output has a gradient for
    /// anything beside the unit's parameters and inputs, and
    /// [`LostGradients::BesideOutput`](crate::LostGradients::BesideOutput) if that left another
    /// recomputed unit. The backward fails with
    /// [`LostGradients::NotRepeatable`](crate::LostGradients::NotRepeatable) if the second run
    /// differs.
    fn recomputed<I: UnitInputs>(
        &self,
        name: &str,
        inputs: I,
        forward: impl Fn(&dyn Parameters, I::Lent<'_>) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let forward =
            move |parameters: &dyn Parameters, lent: &[Tensor]| forward(parameters, I::lend(lent));
        self.run_recomputed(name, &inputs.tensors(), Arc::new(forward))
    }
}

impl<U: Units + ?Sized> UnitsExt for U {}

/// The inputs of a unit: one tensor, or an array of several. A forward borrows them in the same
/// form: `|p, x|` for `&x`, and `|p, [x, skip]|` for `[&x, &skip]`.
pub trait UnitInputs: sealed::Sealed {
    /// The form in which a forward borrows the inputs: `&Tensor`, or an array.
    type Lent<'a>;

    /// Returns the inputs.
    #[doc(hidden)]
    fn tensors(self) -> Vec<Tensor>;

    /// Borrows as many tensors as there are inputs.
    #[doc(hidden)]
    fn lend(tensors: &[Tensor]) -> Self::Lent<'_>;
}

impl<T: sealed::AsTensor> UnitInputs for &T {
    type Lent<'a> = &'a Tensor;

    fn tensors(self) -> Vec<Tensor> {
        vec![self.as_tensor().clone()]
    }

    fn lend(tensors: &[Tensor]) -> &Tensor {
        &tensors[0]
    }
}

impl<const N: usize> UnitInputs for [&Tensor; N] {
    type Lent<'a> = [&'a Tensor; N];

    fn tensors(self) -> Vec<Tensor> {
        self.into_iter().cloned().collect()
    }

    fn lend(tensors: &[Tensor]) -> [&Tensor; N] {
        array::from_fn(|index| &tensors[index])
    }
}

mod sealed {
    use candle_core::{Tensor, Var};

    #[expect(unnameable_types, reason = "it seals `UnitInputs`")]
    pub trait Sealed {}

    impl<T: AsTensor> Sealed for &T {}

    impl<const N: usize> Sealed for [&Tensor; N] {}

    /// A tensor, a variable, or a reference to one.
    #[expect(unnameable_types, reason = "it seals `UnitInputs`")]
    pub trait AsTensor {
        fn as_tensor(&self) -> &Tensor;
    }

    impl AsTensor for Tensor {
        fn as_tensor(&self) -> &Tensor {
            self
        }
    }

    impl AsTensor for Var {
        fn as_tensor(&self) -> &Tensor {
            Var::as_tensor(self)
        }
    }

    impl<T: AsTensor> AsTensor for &T {
        fn as_tensor(&self) -> &Tensor {
            (**self).as_tensor()
        }
    }
}
