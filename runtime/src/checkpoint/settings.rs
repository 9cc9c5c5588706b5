//! The choices of a program about its checkpoints, and the results of saves and loads.

use std::path::PathBuf;
use std::sync::Arc;

use hsdp_checkpoint::{Disk, Files};
use hsdp_sharding::Role;
use serde_json::Value;

/// Options of writing and loading checkpoints.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// The number of generations to keep, at least two.
    pub keep: usize,
    /// The description of this job in the error of another job that wants to write to the same
    /// directory.
    pub holder: String,
    /// The file system.
    pub files: Arc<dyn Files>,
    /// The parameters that checkpoints have; the same on all ranks.
    pub content: Content,
    /// Rule of a load where the optimizer was made with other options; the same on all ranks.
    pub other_options: OtherOptions,
    /// Rule of a load where the checkpoint has other parameters; the same on all ranks.
    pub other_parameters: OtherParameters,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        let holder = format!("process {}", std::process::id());
        Self {
            keep: 2,
            holder,
            files: Arc::new(Disk),
            content: Content::default(),
            other_options: OtherOptions::default(),
            other_parameters: OtherParameters::default(),
        }
    }
}

/// The parameters that checkpoints have. All of them have the
/// [buffers](hsdp_sharding::Param::buffer).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// All parameters. Such a checkpoint can be loaded with either option: it replaces all
    /// parameters.
    #[default]
    All,
    /// The trainable parameters, with their optimizer state. This is for adapters of a large frozen
    /// base, which the program makes or [imports](crate::ShardedModel::import) again. A load
    /// replaces the trainable parameters, and leaves the frozen ones as they are. They must have
    /// the same bits as those of the model that was saved: a checkpoint has a digest of them.
    ///
    /// A checkpoint without frozen parameters cannot be loaded with [`Content::All`]. Its
    /// [`export`](super::export) has the trainable parameters alone. A save in the background
    /// copies these alone, fewer bytes than [`Plan::snapshot`](hsdp_sharding::Plan::snapshot) says.
    Trainable,
}

impl Content {
    /// Returns whether a checkpoint has parameters of this role.
    pub(super) fn has(self, role: Role) -> bool {
        self == Self::All || role == Role::Trainable
    }
}

/// Rule of a load where the options with which the program made its optimizer are not those in
/// the checkpoint.
///
/// If they are equal, a load restores the learning rates that were set during training. So a
/// program with a schedule, which sets the rate in each step, notices nothing, and one that lowered
/// the rate once goes on with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherOptions {
    /// The load fails, and the error lists each difference: the optimizer, its group, the option,
    /// and both values.
    #[default]
    Refuse,
    /// The optimizer takes all options of the checkpoint, with the learning rates as they were,
    /// like PyTorch's `Optimizer.load_state_dict`. Other groups of parameters are an error as with
    /// [`Refuse`](Self::Refuse).
    TakeSaved,
    /// The optimizer keeps the options of the program, with the learning rates that the program has
    /// set.
    KeepOwn,
}

/// Rule of a load where the checkpoint has other parameters than the model, or other parameters
/// are frozen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherParameters {
    /// The load fails, and the error lists the differences: all settings, and of the parameters and
    /// tensors the first few of each kind.
    #[default]
    Refuse,
    /// The model takes each parameter and each buffer that the checkpoint has under its name with
    /// its shape, also where a buffer was a parameter, and keeps its own values of the others. The
    /// optimizer takes the state of parameters that are trained there and here, and begins anew
    /// with the others. [`Resumed`] lists new parameters, new states, and tensors of the checkpoint
    /// that are left over. This is for a new head, a head that is gone, or parameters that are
    /// frozen or trained anew.
    ///
    /// The settings that the model [states](hsdp_sharding::ModelSpec::setting) may be others than
    /// those of the checkpoint: those of the model count, and a warning lists the differences. So a
    /// run begins with other position embeddings, say.
    ///
    /// Where several optimizers make an update, the next one decides which of them gets a parameter
    /// without state. It is an error if a parameter whose state was taken goes to another
    /// optimizer.
    ///
    /// Groups of parameters are compared by their number and options, and not by the parameters
    /// that they have. The optimizer has the same kind as the one that was saved.
    ///
    /// [`Resumed`]: super::Resumed
    TakeFitting,
}

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
    /// The parameters, and then the buffers, that keep the values of the model, with
    /// [`OtherParameters::TakeFitting`](super::OtherParameters::TakeFitting), because the
    /// checkpoint lacks them, or has them with another shape. Empty otherwise, like the next lists.
    pub new_parameters: Vec<String>,
    /// The trained parameters whose optimizer state begins anew: their averages begin as the
    /// parameters, and all else with zeros. Then the buffers whose averages begin anew, as the
    /// buffers.
    pub new_states: Vec<String>,
    /// The tensors of the checkpoint that nothing took: parameters and buffers, and state as
    /// `optimizer:<kind>:<parameter>`.
    pub left_over: Vec<String>,
}
