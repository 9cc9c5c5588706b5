//! candle-nn's `VarBuilder` over the parameters of a unit, so that constructors that take one need
//! no change.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use hsdp_sharding::Role;

use crate::error::{DeclarationError, Error};
use crate::model::Parameters;
use crate::recorded::is_buffer;

/// Makes a `VarBuilder` over `parameters`, in the compute dtype of the unit that reads them, and on
/// their device.
///
/// A layer that is made inside a unit's forward reads the parameters that are gathered for it:
///
/// ```
/// # use candle_core::{Result, Tensor};
/// # use candle_nn::{Module, linear};
/// # use hsdp_candle::{Units, UnitsExt};
/// fn forward(units: &dyn Units, x: &Tensor) -> Result<Tensor> {
///     units.unit("h.0", x, |p, x| {
///         linear(4, 4, hsdp_candle::var_builder(p).pp("h.0"))?.forward(x)
///     })
/// }
/// ```
///
/// The builder reads a parameter when the constructor asks for it, and copies nothing. It has the
/// names of the whole model; a parameter of another unit is gathered with that unit. Its `get`
/// fails with [`DeclarationError::Shape`](crate::DeclarationError::Shape),
/// [`DeclarationError::Dtype`](crate::DeclarationError::Dtype) or
/// [`DeclarationError::Device`](crate::DeclarationError::Device) if the constructor asks for
/// something other than the model declares. For example, an f32 builder over a bf16 model would
/// copy each parameter. It fails with
/// [`DeclarationError::Buffers`](crate::DeclarationError::Buffers) if the constructor asks for
/// running statistics that the model declares as trainable or as a buffer. Initialization hints have
/// no effect (see [`record`](crate::record)).
#[must_use]
pub fn var_builder(parameters: &dyn Parameters) -> VarBuilder<'_> {
    let device = parameters.device().clone();
    VarBuilder::from_backend(Box::new(UnitBackend(parameters)), parameters.dtype(), device)
}

struct UnitBackend<'a>(&'a dyn Parameters);

impl UnitBackend<'_> {
    /// Gets a parameter, and checks its shape if one is given.
    fn checked(
        &self,
        name: &str,
        shape: Option<&Shape>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let spec = self.0.spec();
        if let Some(id) = spec.find(name) {
            let declared = &spec[id].shape;
            if is_buffer(name) && spec[id].role == Role::Trainable {
                Err(Error::Declaration(DeclarationError::Buffers { names: name.to_owned() }))?;
            }
            let parameter = || name.to_owned();
            let unit = || spec[id.unit].name.clone();
            if let Some(asked) = shape.filter(|shape| shape.dims() != declared.as_slice()) {
                let asked = asked.dims().to_vec();
                let declared = declared.clone();
                Err(Error::Declaration(DeclarationError::Shape {
                    parameter: parameter(),
                    unit: unit(),
                    asked,
                    declared,
                }))?;
            }
            if !device.same_device(self.0.device()) {
                let asked = device.location();
                let lies_on = self.0.device().location();
                Err(Error::Declaration(DeclarationError::Device {
                    parameter: parameter(),
                    unit: unit(),
                    asked,
                    lies_on,
                }))?;
            }
            let tensor = self.0.get(name)?;
            // The read parameter may belong to another unit, which computes in another dtype.
            let computed = tensor.dtype();
            if dtype != computed {
                let asked = dtype;
                Err(Error::Declaration(DeclarationError::Dtype {
                    parameter: parameter(),
                    unit: unit(),
                    asked,
                    computed,
                }))?;
            }
            return Ok(tensor);
        }
        if spec.find_buffer(name).is_some() {
            Err(Error::Declaration(DeclarationError::Buffers { names: name.to_owned() }))?;
        }
        self.0.get(name) // It has the error of a name that the model does not have.
    }
}

impl SimpleBackend for UnitBackend<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.checked(name, Some(&shape), dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.checked(name, None, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.spec().find(name).is_some()
    }
}
