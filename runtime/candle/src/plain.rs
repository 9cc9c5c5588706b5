//! The unsharded counterpart of a pass, which runs a model on whole parameters, in plain candle.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use hsdp::Precision;
use hsdp_sharding::{ModelSpec, Unit};

use crate::convert::{candle_dtype, cast_inputs, cast_output, casts_inputs};
use crate::error::{DeclarationError, Error};
use crate::model::{Forward, Parameters, Units};

/// Whole parameters in candle [`Var`]s, for comparison with a sharded run, and to sample from a
/// trained model.
#[derive(Debug)]
pub struct Plain {
    spec: ModelSpec,
    precision: Precision,
    /// Compute dtype of units that declare none.
    dtype: DType,
    /// Whether the inputs of each unit are cast to the unit's compute dtype.
    casts_inputs: bool,
    device: Device,
    parameters: BTreeMap<String, Var>,
}

impl Plain {
    /// Creates the parameters of `spec` from f32 `values` by name, row-major. They are cast to the
    /// dtype of parameters in `precision`, or to the dtype that their unit
    /// [declares](hsdp_sharding::Unit::compute_in). Outputs are cast to its output dtype. Not
    /// collective.
    ///
    /// # Errors
    /// If a parameter has no values, or another number of them, or candle lacks the dtype.
    pub fn new(
        spec: ModelSpec,
        values: &BTreeMap<String, Vec<f32>>,
        precision: Precision,
    ) -> Result<Self> {
        Self::on(spec, values, precision, &Device::Cpu)
    }

    /// Creates the parameters as [`new`](Self::new) does, on `device`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and the errors of the device.
    pub fn on(
        spec: ModelSpec,
        values: &BTreeMap<String, Vec<f32>>,
        precision: Precision,
        device: &Device,
    ) -> Result<Self> {
        let dtype = candle_dtype(precision.parameters)?;
        let var = |unit: &Unit, param: &hsdp_sharding::Param| {
            let dtype = dtype_of(unit, dtype)?;
            let Some(values) = values.get(&param.name) else {
                bail!("parameter {} has no values", param.name)
            };
            let shape = Shape::from(param.shape.clone());
            let tensor = Tensor::from_slice(values, shape, device)?.to_dtype(dtype)?;
            Ok((param.name.clone(), Var::from_tensor(&tensor)?))
        };
        let all = spec.params().map(|(id, param)| var(&spec[id.unit], param));
        let parameters = all.collect::<Result<_>>()?;
        let casts_inputs = casts_inputs(&spec);
        Ok(Self { spec, precision, dtype, casts_inputs, device: device.clone(), parameters })
    }

    /// Returns the parameters by name.
    #[must_use]
    pub fn parameters(&self) -> &BTreeMap<String, Var> {
        &self.parameters
    }
}

/// Returns the compute dtype of a unit. It is `dtype` unless the unit declares another.
fn dtype_of(unit: &Unit, dtype: DType) -> Result<DType> {
    unit.compute_dtype.map_or(Ok(dtype), candle_dtype)
}

/// Parameters for the forward of a unit.
struct PlainUnit<'a> {
    plain: &'a Plain,
    dtype: DType,
}

impl Parameters for PlainUnit<'_> {
    fn get(&self, name: &str) -> Result<Tensor> {
        self.plain.get(name)
    }

    fn spec(&self) -> &ModelSpec {
        &self.plain.spec
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> &Device {
        &self.plain.device
    }
}

impl Parameters for Plain {
    fn get(&self, name: &str) -> Result<Tensor> {
        let Some(id) = self.spec.find(name) else { bail!("the model has no parameter {name}") };
        Ok(self.parameters[&self.spec[id].name].as_tensor().clone())
    }

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> &Device {
        &self.device
    }
}

impl Units for Plain {
    fn run_unit(&self, name: &str, inputs: &[Tensor], forward: Forward<'_>) -> Result<Tensor> {
        let units = self.spec.units();
        let Some(unit) = units.iter().find(|unit| unit.name == name) else {
            return Err(Error::Declaration(DeclarationError::unknown_unit(name, units)).into());
        };
        let of_unit = PlainUnit { plain: self, dtype: dtype_of(unit, self.dtype)? };
        match self.casts_inputs {
            true => forward(&of_unit, &cast_inputs(inputs, of_unit.dtype)?),
            false => forward(&of_unit, inputs),
        }
    }

    fn output(&self, tensor: &Tensor) -> Result<Tensor> {
        cast_output(self.precision, tensor)
    }
}
