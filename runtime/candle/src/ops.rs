//! The custom ops that tie a unit's forward to the runtime.
//!
//! ```text
//!   input --AfterBackward--+--> InputOp (of each input) -+
//!                          |                             v
//!                          +---> forward --------> BeforeBackward --> output
//!                                   ^
//!   anchor --> Unshard (parameter) --+
//! ```
//!
//! candle walks the graph backwards. It reaches `BeforeBackward` before any op of the unit, each
//! `Unshard` when the parameter's gradient is complete, and the last `AfterBackward` after all ops
//! of the unit.
//!
//! The chain of the inputs is the first parent of the output. candle sorts the parents of a tensor
//! one after the other, so everything before the inputs is sorted before the ops of the unit, and a
//! unit's gradients are complete before the backward leaves it. Without that parent, candle's order
//! would depend on how the forward is written: if a weight is on the left of a matmul, all units
//! would be reduced at the end of the backward, and in forward order. An input that the output does
//! not depend on is not in the chain, so that parameters before it do not seem to be trained.
//!
//! A recomputed unit is one op, [`RecomputeOp`](crate::recompute::RecomputeOp), whose parent is the
//! chain. Its backward runs a backward of its own, and leaves the gradient of each input to the
//! input's cell, or to its `InputOp`. Only the op depends on the chain, so candle comes to each
//! `InputOp` after the op and before its input, whatever else depends on that input.
//!
//! Where a scalar represents a tensor in the graph (see [`layer`](crate::layer)), these ops are
//! applied to the scalar.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor};
#[cfg(feature = "candle-cuda")]
use candle_core::{CudaStorage, Storage, bail};
use parking_lot::Mutex;

#[cfg(feature = "candle-cuda")]
use crate::cuda;
use crate::gradient::{Gradient, GradientCell, GradientSum};
#[cfg(feature = "candle-cuda")]
use crate::storage::Gathered;
use crate::storage::copy;
use crate::unit::{LiveUnit, UnitUsage};
use crate::zeros;

/// Op on the anchor, whose result represents a parameter on the CPU. Its backward passes the
/// gradient to the unit.
pub(crate) struct Unshard {
    pub(crate) unit: Arc<LiveUnit>,
    /// Index of the parameter in the unit.
    pub(crate) index: usize,
    /// Gradient of the parameter.
    pub(crate) cell: Arc<GradientCell>,
}

impl CustomOp1 for Unshard {
    fn name(&self) -> &'static str {
        "unshard"
    }

    fn cpu_fwd(&self, anchor: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        copy(anchor, layout)
    }

    fn bwd(&self, _: &Tensor, parameter: &Tensor, count: &Tensor) -> Result<Option<Tensor>> {
        let zeros = || Gradient::zeros(self.unit.shape(self.index).elem_count());
        // Without a gradient, only the order of the backward has led here.
        let gradient = self.cell.take(count)?.unwrap_or_else(|| GradientSum::Host(zeros()));
        let counts = zeros::counts(parameter.id(), &gradient)?;
        self.unit.accept(self.index, counts.then_some(gradient))?;
        Ok(None)
    }
}

/// Op that makes a tensor of a gathered parameter on a GPU, by a copy. Its backward takes the
/// gradient.
#[cfg(feature = "candle-cuda")]
pub(crate) struct UnshardOnDevice {
    pub(crate) unit: Arc<LiveUnit>,
    /// Index of the parameter in the unit.
    pub(crate) index: usize,
    pub(crate) parameter: Mutex<Option<Gathered>>,
}

#[cfg(feature = "candle-cuda")]
impl CustomOp1 for UnshardOnDevice {
    fn name(&self) -> &'static str {
        "unshard"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("unshard ran on another device than its pass")
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.parameter.lock().take().map(Gathered::into_storage).transpose()? {
            Some(Storage::Cuda(storage)) => Ok((storage, self.unit.shape(self.index))),
            _ => bail!("unshard ran twice, or on another device than its pass"),
        }
    }

    fn bwd(&self, _: &Tensor, parameter: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = GradientSum::Tensor(gradient.detach());
        let counts = zeros::counts(parameter.id(), &gradient)?;
        self.unit.accept(self.index, counts.then_some(gradient))?;
        Ok(None)
    }
}

/// Op that returns its first parent, the chain of the inputs before this one. The second parent is
/// an input. The chain is a scalar whose value has no meaning.
#[derive(Clone, Debug, Default)]
pub(crate) struct InputOp(Arc<Mutex<Option<Tensor>>>);

impl InputOp {
    /// Sets the gradient that the backward gives to the input. Without it, the input gets zeros and
    /// only sets the order.
    pub(crate) fn set_gradient(&self, gradient: Tensor) {
        *self.0.lock() = Some(gradient);
    }
}

impl CustomOp2 for InputOp {
    fn name(&self) -> &'static str {
        "input of a unit"
    }

    fn cpu_fwd(
        &self,
        before: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        copy(before, layout)
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(
        &self,
        before: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        cuda::copy(before, layout)
    }

    fn bwd(
        &self,
        before: &Tensor,
        input: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = match self.0.lock().take() {
            Some(gradient) => Some(gradient),
            None => zeros::for_parent(input)?,
        };
        Ok((zeros::for_parent(before)?, gradient))
    }
}

/// Op that returns its second parent, the output of a unit. The first parent is the chain of the
/// inputs, and only sets the order. The backward gathers the unit's parameters.
pub(crate) struct BeforeBackward(pub(crate) Arc<UnitUsage>);

impl CustomOp2 for BeforeBackward {
    fn name(&self) -> &'static str {
        "before the backward of a unit"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        output: &CpuStorage,
        layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        copy(output, layout)
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        output: &CudaStorage,
        layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        cuda::copy(output, layout)
    }

    fn bwd(
        &self,
        inputs: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.0.gather()?;
        Ok((zeros::for_parent(inputs)?, Some(gradient.clone())))
    }
}

/// The identity, with a special backward.
pub(crate) enum IdentityOp {
    /// The backward frees frozen parameters, if it has come to all inputs of the unit.
    AfterBackward(Arc<UnitUsage>),
    /// The backward returns a gradient that an earlier backward computed. A backward that begins
    /// here begins with that gradient instead of ones.
    Seed(Tensor),
}

impl CustomOp1 for IdentityOp {
    fn name(&self) -> &'static str {
        match self {
            Self::AfterBackward(_) => "after the backward of a unit",
            Self::Seed(_) => "seed of a recomputed unit",
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        copy(storage, layout)
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::copy(storage, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        match self {
            Self::AfterBackward(usage) => usage.leave_input()?,
            Self::Seed(earlier) => return Ok(Some(earlier.clone())),
        }
        Ok(Some(gradient.clone()))
    }
}
