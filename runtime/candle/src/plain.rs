//! The unsharded counterpart of a pass: the same model on whole parameters, in plain candle.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use hsdp::Precision;
use hsdp_sharding::ModelSpec;

use crate::dtype::{candle_dtype, cast_output};
use crate::model::{Forward, Parameters, Units};

/// Whole parameters in candle [`Var`]s, to compare a sharded run with, and to sample from a trained
/// model.
#[derive(Debug)]
pub struct Plain {
    spec: ModelSpec,
    precision: Precision,
    /// The dtype of the parameters.
    dtype: DType,
    device: Device,
    parameters: BTreeMap<String, Var>,
}

impl Plain {
    /// The parameters of `spec`, with f32 `values` by name, row-major, cast to the dtype that
    /// `precision` has for parameters. Outputs are cast to its output dtype. Not collective.
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

    /// As [`new`](Self::new), with parameters on `device`.
    ///
    /// # Errors
    /// As [`new`](Self::new), and the errors of the device.
    pub fn on(
        spec: ModelSpec,
        values: &BTreeMap<String, Vec<f32>>,
        precision: Precision,
        device: &Device,
    ) -> Result<Self> {
        let dtype = candle_dtype(precision.parameters)?;
        let var = |param: &hsdp_sharding::Param| {
            let Some(values) = values.get(&param.name) else {
                bail!("parameter {} has no values", param.name)
            };
            let shape = Shape::from(param.shape.clone());
            let tensor = Tensor::from_slice(values, shape, device)?.to_dtype(dtype)?;
            Ok((param.name.clone(), Var::from_tensor(&tensor)?))
        };
        let parameters = spec.params().map(|(_, param)| var(param)).collect::<Result<_>>()?;
        Ok(Self { spec, precision, dtype, device: device.clone(), parameters })
    }

    /// The parameters by name.
    #[must_use]
    pub fn parameters(&self) -> &BTreeMap<String, Var> {
        &self.parameters
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
    fn unit(&self, _name: &str, input: &Tensor, forward: Forward<'_>) -> Result<Tensor> {
        forward(self, input)
    }

    fn output(&self, tensor: &Tensor) -> Result<Tensor> {
        cast_output(self.precision, tensor)
    }
}
