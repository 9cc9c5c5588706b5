//! Parameters for one use of a unit.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use hsdp::{ModelSpec, ParamId};
use hsdp_sharding::Role;
use parking_lot::Mutex;

use super::{Pass, PassKind};
use crate::error::{DeclarationError, Error};
use crate::model::Parameters;
use crate::ops::Unshard;
use crate::unit::{LiveUnit, UnitUsage};

/// Provides the forward of one use of a unit with its parameters, as tensors of candle's graph.
pub(super) struct PassReader<'a, 'step> {
    pub(super) pass: &'a Pass<'step>,
    pub(super) own: &'a Arc<LiveUnit>,
    pub(super) usage: &'a Arc<UnitUsage>,
}

impl PassReader<'_, '_> {
    fn read(&self, name: &str) -> Result<Tensor, Error> {
        let (unit, id) = self.gathered(name)?;
        if self.pass.kind == PassKind::Evaluation {
            return self.tensor(unit, id);
        }
        match unit.role(id.index) {
            Role::Frozen => self.usage.reads_frozen(unit),
            Role::Trainable => unit.awaits_graph(id.index),
        }
        self.tensor(unit, id)
    }

    /// Finds a parameter, and gathers its unit.
    pub(super) fn gathered(&self, name: &str) -> Result<(&Arc<LiveUnit>, ParamId), Error> {
        let Some(id) = self.spec().find(name) else {
            let unit = self.own.name().to_owned();
            return Err(Error::Declaration(DeclarationError::UnknownParameter {
                unit,
                name: name.to_owned(),
            }));
        };
        let unit = &self.pass.units.states[id.unit.index()];
        self.usage.reads(unit);
        unit.gather()?;
        Ok((unit, id))
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
        if unit.role(index) == Role::Frozen || self.pass.kind == PassKind::Evaluation {
            return Ok(parameter.into_tensor(unit.shape(index))?);
        }
        let unit = Arc::clone(unit);
        let op = Unshard { unit, index, parameter: Mutex::new(Some(parameter)) };
        Ok(self.pass.anchor.apply_op1(op)?)
    }
}

impl Parameters for PassReader<'_, '_> {
    fn get(&self, name: &str) -> candle_core::Result<Tensor> {
        Ok(self.read(name)?)
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
