//! The unsharded counterpart of a pass, which runs a model on whole parameters, in plain candle.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use hsdp::Precision;
use hsdp_sharding::{ModelSpec, Param, Unit};
use parking_lot::Mutex;

use crate::convert::{candle_dtype, cast_inputs, cast_output, casts_inputs, check_written};
use crate::error::{DeclarationError, Error};
use crate::model::{Forward, ForwardMode, Parameters, Units};
use crate::statistics::{BatchStatistics, declared};

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
    buffers: Mutex<BTreeMap<String, Tensor>>,
    mode: Option<ForwardMode>,
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
        let tensor = |param: &Param| {
            let Some(values) = values.get(&param.name) else {
                bail!("{} has no values", param.name)
            };
            Tensor::from_slice(values, Shape::from(param.shape.clone()), device)
        };
        let var = |unit: &Unit, param: &Param| {
            let tensor = tensor(param)?.to_dtype(dtype_of(unit, dtype)?)?;
            Ok((param.name.clone(), Var::from_tensor(&tensor)?))
        };
        let all = spec.params().map(|(id, param)| var(&spec[id.unit], param));
        let parameters = all.collect::<Result<_>>()?;
        let buffers = spec.buffers().map(|(_, it)| Ok((it.name.clone(), tensor(it)?)));
        let buffers = Mutex::new(buffers.collect::<Result<_>>()?);
        let casts_inputs = casts_inputs(&spec);
        Ok(Self {
            spec,
            precision,
            dtype,
            casts_inputs,
            device: device.clone(),
            parameters,
            buffers,
            mode: None,
        })
    }

    /// Returns the parameters by name.
    #[must_use]
    pub fn parameters(&self) -> &BTreeMap<String, Var> {
        &self.parameters
    }

    /// Sets whether the forwards that follow are a part of training. A layer that differs in an
    /// evaluation, such as a batch norm, needs it.
    #[must_use]
    pub fn in_mode(self, mode: ForwardMode) -> Self {
        Self { mode: Some(mode), ..self }
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

    fn buffer(&self, name: &str) -> Result<Tensor> {
        self.plain.buffer(name)
    }

    fn write_buffer(&self, name: &str, value: &Tensor) -> Result<()> {
        self.plain.write_buffer(name, value)
    }

    fn mode(&self) -> Result<ForwardMode> {
        self.plain.mode()
    }

    fn statistics(&self, name: &str) -> Option<BatchStatistics> {
        self.plain.statistics(name)
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

    fn buffer(&self, name: &str) -> Result<Tensor> {
        match self.buffers.lock().get(name) {
            Some(buffer) => Ok(buffer.clone()),
            None => bail!("the model has no buffer {name}"),
        }
    }

    fn write_buffer(&self, name: &str, value: &Tensor) -> Result<()> {
        let Some(id) = self.spec.find_buffer(name) else { bail!("the model has no buffer {name}") };
        if self.mode == Some(ForwardMode::Evaluation) {
            bail!("buffer {name} is written in an evaluation")
        }
        check_written(&self.spec[id], value)?;
        let value = value.detach().to_dtype(DType::F32)?;
        self.buffers.lock().insert(name.to_owned(), value);
        Ok(())
    }

    fn mode(&self) -> Result<ForwardMode> {
        match self.mode {
            Some(mode) => Ok(mode),
            None => bail!(
                "a layer computes another function in an evaluation than in training: set one of \
                 the two with `Plain::in_mode`"
            ),
        }
    }

    fn statistics(&self, name: &str) -> Option<BatchStatistics> {
        declared(&self.spec, name).map(|_| BatchStatistics::of_whole_batch())
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
