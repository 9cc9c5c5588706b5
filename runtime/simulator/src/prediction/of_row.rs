//! Rows of measurements, as predictions.

use std::fmt;
use std::sync::Arc;

use hsdp_sharding::{Mesh, Offload, Plan, PlanOptions, State};

use super::Workload;
use crate::calibrate::{AllReduceRow, StepRow};
use crate::host::Microbatches;
use crate::{Batch, Collective, Error, Gpt, Machine, Shapes, Time, collective_cost};

impl StepRow {
    /// The step that was measured, as hsdp makes it: AdamW with f32 masters, wire and parameters in the dtype of computation. A model that is not
    /// sharded stays gathered. All-reduces follow the last microbatch, as they do where its number is not given: the programs that were
    /// measured do so.
    ///
    /// # Errors
    /// Errors of a plan and of a computation.
    pub fn workload(&self) -> Result<Workload, Error> {
        let Self { ranks, shards, microbatches, batch, model } = *self;
        let spec = model.spec().updated_by(|_| State::Elements(2));
        let spec = if shards == 1 { spec.all_kept() } else { spec };
        let options = PlanOptions {
            param_dtype: batch.dtype,
            reduce_dtype: batch.dtype,
            ..PlanOptions::default()
        };
        Ok(Workload {
            plan: Arc::new(Plan::new(spec, Mesh::new(ranks / shards, shards)?, options)?),
            computation: Arc::new(model.computation()?),
            batch,
            microbatches: Microbatches::Asked(microbatches as u64),
            offload: Offload::None,
        })
    }
}

/// The columns that tell rows apart.
impl fmt::Display for StepRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, shards, microbatches, batch, model } = self;
        let Gpt { width, layers, .. } = model;
        write!(f, "{ranks} ranks")?;
        if *shards > 1 {
            write!(f, " in groups of {shards}")?;
        }
        let Batch { sequences, context, .. } = batch;
        write!(
            f,
            ", width {width}, {layers} layers, {microbatches} microbatches of {sequences} x {context} tokens"
        )
    }
}

impl AllReduceRow {
    /// The predicted time on the cards of a machine.
    ///
    /// # Errors
    /// [`Error::TooManyRanks`] if the machine has too few cards and no network.
    pub fn predict(&self, machine: &Machine) -> Result<Time, Error> {
        let group = Shapes::new(Mesh::new(1, self.members)?, machine)?.world();
        Ok(collective_cost(machine, &group, Collective::AllReduce, self.bytes).time)
    }
}

impl fmt::Display for AllReduceRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks, {} bytes", self.members, self.bytes)
    }
}
