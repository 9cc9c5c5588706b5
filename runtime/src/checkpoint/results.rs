//! The results of saves and loads.

use std::path::PathBuf;

use serde_json::Value;

/// A checkpoint that was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Steps that the optimizer had completed.
    pub step: u64,
    /// The checkpoint's directory on rank 0, `None` on the other ranks.
    pub path: Option<PathBuf>,
}

/// A checkpoint from which a model goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Resumed {
    /// Steps that the optimizer had completed when the checkpoint was saved.
    pub step: u64,
    /// The value that the program saved with the checkpoint.
    pub user: Value,
    /// The problems of newer checkpoints that were broken, one text for each.
    pub broken: Vec<String>,
    /// The steps of later checkpoints, ascending, if the program has named the step. No save
    /// succeeds up to the last of them, unless they are broken, or
    /// [`Checkpoints::discard_after`](super::Checkpoints::discard_after) removes them. Rank 0 logs
    /// a warning, too, if these checkpoints may save.
    pub later: Vec<u64>,
    /// The parameters that keep the values of the model, with
    /// [`OtherParameters::TakeFitting`](super::OtherParameters::TakeFitting), because the
    /// checkpoint lacks them, or has them with another shape. Empty otherwise, like the next lists.
    pub new_parameters: Vec<String>,
    /// The trained parameters whose optimizer state begins anew: their averages begin as the
    /// parameters, and all else with zeros.
    pub new_states: Vec<String>,
    /// The tensors of the checkpoint that nothing took: parameters, and state as
    /// `optimizer:<kind>:<parameter>`.
    pub left_over: Vec<String>,
}
