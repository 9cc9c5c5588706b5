//! Parameters for one use of a unit.

use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use hsdp::{BufferId, ModelSpec, ParamId};
use hsdp_sharding::Role;

use super::Pass;
use crate::convert::check_written;
use crate::error::{DeclarationError, Error};
use crate::gradient::GradientCell;
use crate::layer;
use crate::model::{ForwardMode, Parameters};
use crate::ops::Unshard;
use crate::statistics::{self, BatchStatistics};
use crate::unit::{LiveUnit, PassKind, UnitUsage};

/// Provides the forward of one use of a unit with its parameters, as tensors of candle's graph.
pub(super) struct PassReader<'a, 'step> {
    pub(super) pass: &'a Pass<'step>,
    pub(super) own: &'a Arc<LiveUnit>,
    pub(super) usage: &'a Arc<UnitUsage>,
}

impl PassReader<'_, '_> {
    fn read(&self, name: &str) -> Result<Tensor, Error> {
        let (unit, id) = self.gathered(name)?;
        match unit.role(id.index) {
            _ if self.pass.kind == PassKind::Evaluation => {}
            Role::Frozen => self.usage.reads_frozen(unit),
            Role::Trainable => unit.awaits_graph(id.index),
        }
        self.tensor(unit, id)
    }

    /// Finds a parameter, and gathers its unit.
    pub(super) fn gathered(&self, name: &str) -> Result<(&Arc<LiveUnit>, ParamId), Error> {
        let Some(id) = self.spec().find(name) else {
            let unit = self.own.name().to_owned();
            let name = name.to_owned();
            return Err(Error::Declaration(match self.spec().find_buffer(&name) {
                Some(_) => DeclarationError::IsBuffer { unit, name },
                None => DeclarationError::UnknownParameter { unit, name },
            }));
        };
        let unit = &self.pass.units.all[id.unit.index()];
        self.usage.reads(unit);
        unit.gather()?;
        Ok((unit, id))
    }

    /// Finds a buffer.
    pub(super) fn found(&self, name: &str) -> Result<BufferId, Error> {
        self.spec().find_buffer(name).ok_or_else(|| {
            let unit = self.own.name().to_owned();
            Error::Declaration(DeclarationError::UnknownBuffer { unit, name: name.to_owned() })
        })
    }

    /// Returns a buffer as the step has written it so far.
    pub(super) fn buffered(&self, id: BufferId) -> Result<Tensor, Error> {
        let values = self.pass.handle.buffer(id)?;
        Ok(Tensor::from_vec(values, self.shape(id), &self.pass.device)?)
    }

    pub(super) fn write(&self, id: BufferId, value: &Tensor) -> Result<(), Error> {
        check_written(&self.spec()[id], value)?;
        let values = value.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(self.pass.handle.write_buffer(id, &values)?)
    }

    fn shape(&self, id: BufferId) -> Shape {
        Shape::from(self.spec()[id].shape.clone())
    }

    /// Returns the unit that declares statistics under this name, and their index in the unit.
    pub(super) fn statistics_of(&self, name: &str) -> Option<(&Arc<LiveUnit>, usize)> {
        let (unit, index) = statistics::declared(self.spec(), name)?;
        Some((&self.pass.units.all[unit.index()], index))
    }

    /// Returns the tensor of a parameter. The whole pass uses the same one.
    pub(super) fn tensor(&self, unit: &Arc<LiveUnit>, id: ParamId) -> Result<Tensor, Error> {
        let mut tensors = self.pass.tensors.lock();
        if let Some(tensor) = tensors.get(&id) {
            return Ok(tensor.clone());
        }
        let tensor = self.make(unit, id.index)?;
        unit.was_taken(id.index, &tensor);
        tensors.insert(id, tensor.clone());
        Ok(tensor)
    }

    fn make(&self, unit: &Arc<LiveUnit>, index: usize) -> Result<Tensor, Error> {
        let parameter = unit.take(index);
        if unit.role(index) == Role::Frozen {
            return Ok(parameter.into_tensor(unit.shape(index))?);
        }
        let unit = Arc::clone(unit);
        #[cfg(feature = "candle-cuda")]
        if self.pass.device.is_cuda() {
            let parameter = parking_lot::Mutex::new(Some(parameter));
            let op = crate::ops::UnshardOnDevice { unit, index, parameter };
            return Ok(self.pass.anchor.apply_op1(op)?);
        }
        let shape = unit.shape(index);
        let cell = Arc::<GradientCell>::default();
        let scalar =
            self.pass.anchor.apply_op1(Unshard { unit, index, cell: Arc::clone(&cell) })?;
        Ok(layer::viewed(scalar, cell, parameter.into_storage()?, shape)?)
    }
}

impl Parameters for PassReader<'_, '_> {
    fn get(&self, name: &str) -> candle_core::Result<Tensor> {
        Ok(self.read(name)?)
    }

    fn buffer(&self, name: &str) -> candle_core::Result<Tensor> {
        Ok(self.buffered(self.found(name)?)?)
    }

    fn write_buffer(&self, name: &str, value: &Tensor) -> candle_core::Result<()> {
        Ok(self.write(self.found(name)?, value)?)
    }

    fn mode(&self) -> candle_core::Result<ForwardMode> {
        Ok(self.own.kind().into())
    }

    fn statistics(&self, name: &str) -> Option<BatchStatistics> {
        let (unit, index) = self.statistics_of(name)?;
        Some(BatchStatistics::once(Arc::clone(unit), index))
    }

    fn spec(&self) -> &ModelSpec {
        self.own.spec()
    }

    fn dtype(&self) -> DType {
        self.own.dtype()
    }

    fn device(&self) -> &Device {
        &self.pass.device
    }
}
