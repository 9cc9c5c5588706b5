//! The names of a training loop: `use hsdp::prelude::*;`.
//!
//! The module has the types that a program writes down to describe a model, to train it and to run its ranks. A program
//! imports rarer names one by one from the crate root.

pub use crate::{
    AdamW, AdamWOptions, DType, Full, LossSum, Mesh, ModelOptions, ModelSpec, Optimizer, Param,
    Pass, Precision, Sgd, SgdOptions, ShardedModel, StepOptions, Unit, UnitId, World, WorldOptions,
};
