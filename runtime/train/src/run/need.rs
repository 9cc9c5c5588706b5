//! The memory of a run.

use hsdp::{ModelSpec, Placement, Plan};

use crate::failure::Failure;
use crate::memory::{Need, product};
use crate::options::RunOptions;
use crate::record::StepRecord;

impl Need {
    /// Returns the memory of a run of `steps` steps in this process: a record of each step, and the
    /// sharded model of each rank here. Memory on a device is not counted.
    ///
    /// # Errors
    /// [`Failure::Input`] if the mesh or the options cannot have this model.
    pub fn of_run(options: &RunOptions, spec: ModelSpec, steps: usize) -> Result<Self, Failure> {
        let plan = Plan::new(spec, options.mesh, options.model().plan_options());
        let plan = plan.map_err(Failure::input)?;
        let records = product(&[steps, size_of::<StepRecord>()]);
        let need = Self::default().with("a record of each step", records);
        let model = plan.memory().total().get().saturating_mul(options.ranks_here() as u64);
        Ok(match options.device {
            Placement::Host => need.with("the sharded model", model),
            _ => need,
        })
    }
}
