//! The description of a model: its parameters, and the units in which they are gathered.

mod model;
mod param;
mod state;
mod unit;

#[cfg(test)]
mod tests;

pub use self::model::{ModelSpec, ParamId, UnitId};
pub use self::param::{Granularity, Param, Role};
pub use self::state::{Matrices, State};
pub use self::unit::{AfterForward, Unit};
