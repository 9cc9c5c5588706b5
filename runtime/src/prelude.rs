//! The names of a training loop: `use hsdp::prelude::*;`.
//!
//! The module has the types that a program writes down to describe a model, to train it and to run
//! its ranks. A program imports rarer names one by one from the crate root. Programs that train models
//! of candle import `hsdp_candle::prelude::*` in its place, where `Pass` is that of candle.

pub use crate::{
    Accumulation, AdamW, AdamWOptions, DType, Full, Gradients, LearningRate, LossSum, Mesh,
    ModelOptions, ModelSpec, Optimizer, Param, Pass, Precision, Sgd, SgdOptions, ShardedModel,
    StepOptions, Unit, UnitGradients, UnitId, Unused, Update, World, WorldOptions,
};
