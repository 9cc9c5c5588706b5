//! Golden runs: trainings by PyTorch, unsharded, with which sharded ones are compared.

pub mod batch_norm;
