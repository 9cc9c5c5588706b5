//! The names of a training loop with candle: `use hsdp_candle::prelude::*;`.
//!
//! The module has all names of [`hsdp::prelude`], so that a program imports this one alone. Only
//! `Pass` differs: it is this crate's pass, which runs a forward, and is made from an
//! [`hsdp::Pass`].

pub use hsdp::prelude::*;

pub use crate::{
    Parameters, Pass, Plain, Recorded, Units, UnitsExt, candle_dtype, record, var_builder,
};
