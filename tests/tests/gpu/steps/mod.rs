//! Whole steps of models whose parts lie on a device, beside equal steps on the host, through the
//! public API.
//!
//! In reading order: `training` (the model, and its gradients made by hand), `bits` (parameters,
//! norms, bytes), `non_finite`, `drops` (steps that are given up), `full` (a gathered unit),
//! `updates`, `muon`, `statistics` (of a batch, over all ranks), `refused`, `exhausted` (no memory
//! left), `planned_memory` (the memory that a model holds, against the plan), `offload`,
//! `several_dtypes`, `steady`, `checkpoints`.

mod bits;
mod checkpoints;
mod drops;
mod exhausted;
mod full;
mod muon;
mod non_finite;
mod offload;
mod planned_memory;
mod refused;
mod several_dtypes;
mod statistics;
mod steady;
mod training;
mod updates;

use hsdp::{ModelOptions, Offload, Placement, Unused};
use hsdp_tests::support::worlds::mesh;

/// All ranks share this device.
const DEVICE: Placement = Placement::Cuda { ordinal: 0, offload: Offload::None };

/// The same, with this in host memory.
const fn offloading(offload: Offload) -> Placement {
    Placement::Cuda { ordinal: 0, offload }
}

/// Beside each other: what is expected, and what is tested.
const PLACES: [Placement; 2] = [Placement::Host, DEVICE];

/// A model on a mesh, which lies there.
fn placed(placement: Placement, [replicate, shard]: [usize; 2]) -> ModelOptions {
    // Some tests give no gradients, or leave a parameter out.
    ModelOptions { placement, unused: Unused::Warn, ..ModelOptions::on(mesh(replicate, shard)) }
}
