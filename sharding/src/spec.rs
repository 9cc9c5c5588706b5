//! The description of a model: which parameters there are, and which are gathered together.

mod check;
mod model;
mod param;
mod unit;

#[cfg(test)]
mod tests;

pub use self::check::TieProblem;
pub use self::model::{ModelSpec, ParamId, UnitId};
pub use self::param::{Granularity, Param, Role};
pub use self::unit::{AfterForward, Unit};
