//! Errors of schedules, machines and simulations.

/// The reason why a schedule, a machine or a simulation was refused. Every variant is a mistake of the input.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model, the mesh or the options cannot be planned.
    #[error(transparent)]
    Plan(#[from] hsdp_sharding::Error),
}
