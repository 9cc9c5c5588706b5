//! Errors of schedules, machines and simulations.

/// The reason why a schedule, a machine or a simulation was refused. Every variant is a mistake of the input.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model, the mesh or the options cannot be planned.
    #[error(transparent)]
    Plan(#[from] hsdp_sharding::Error),
    /// The orders of two ranks have other operations, or the same in other orders.
    #[error(
        "the orders of two ranks do not meet: each waits for an operation that the other has not issued"
    )]
    Stuck,
}
