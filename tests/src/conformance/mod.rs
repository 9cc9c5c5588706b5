//! The conformance runner: runs cases with the results of other software against the runtime.
//!
//! A case is a folder in the format of `cases/FORMAT.md`. [`Case::read`] checks all that can be
//! checked without running, so that later failures are errors of the runtime; [`Case::run`] starts
//! as many ranks as the case needs and compares.
//!
//! | kind | drives | file |
//! |---|---|---|
//! | `reduce` | the reduction engine, with gradients from a file | `reduce`, `ledger` |
//! | `train` | the GPT of `hsdp-candle`, for some steps | `train` |
//! | `vjp` | a differentiable collective, forward and backward | `vjp` |
//!
//! `generate` makes `reduce` cases by chance, `ranks` runs threads, `compare` holds results against
//! bounds, `tensors` and `error` read files.

mod case;
mod compare;
mod error;
mod generate;
mod ledger;
mod ranks;
mod reduce;
mod tensors;
mod train;
mod vjp;

pub use self::case::{Case, MOST_RANKS};
pub use self::compare::{Verdict, Worst};
pub use self::error::CaseError;
pub use self::ranks::{Carrier, Site};
#[cfg(feature = "mpi")]
pub use self::ranks::{join, leave};
pub use self::reduce::{CaseParam, ReduceCase};
pub use self::train::TrainCase;
pub use self::vjp::VjpCase;
