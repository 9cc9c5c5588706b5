//! The locks, atomics, threads and the clock of this crate, behind one name. They are those of `parking_lot` and std, and
//! under `--cfg shuttle` those of a model checker. PROTOCOL.md, "Model checking".

#[cfg(shuttle)]
mod model;
#[cfg(not(shuttle))]
mod plain;

#[cfg(shuttle)]
pub(crate) use self::model::*;
#[cfg(not(shuttle))]
pub(crate) use self::plain::*;
