//! Errors of a mesh, a model description, a layout or a plan.

use std::fmt;

use crate::{DType, Matrices, State};

/// The reason why a mesh, model description, layout or plan was refused. Every variant is a mistake
/// of the caller, since the functions of this crate depend on their arguments alone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh has an axis of size zero, or more ranks than a [`Rank`](crate::Rank) can number.
    #[error(
        "mesh {replicate}x{shard}: each axis needs at least 1 rank, \
         and both together at most 4294967295"
    )]
    InvalidMesh {
        /// Size of the replicate axis, as given.
        replicate: usize,
        /// Size of the shard axis, as given.
        shard: usize,
    },
    /// A layout was asked for a shard group without members.
    #[error("unit `{unit}`: a shard group of 0 ranks cannot hold it")]
    EmptyShardGroup {
        /// Name of the unit.
        unit: String,
    },
    /// A text cannot be parsed as the value that it should name.
    #[error("`{text}` is not a valid {what}: expected {expected}")]
    Unparsable {
        /// The kind of value that was expected: "mesh", "dtype", ...
        what: &'static str,
        /// The text, as given.
        text: String,
        /// The texts that are accepted.
        expected: &'static str,
    },
    /// A model has no unit.
    #[error("the model has 0 units")]
    EmptyModel,
    /// A unit has no parameter.
    #[error("unit `{unit}` has 0 parameters")]
    EmptyUnit {
        /// Name of the unit.
        unit: String,
    },
    /// Two parameters, or two units, have the same name.
    #[error("two {what}s are called `{name}`: number {first} and number {second} of the model")]
    DuplicateName {
        /// The kind of the two: "parameter", "buffer", "statistic" or "unit".
        what: &'static str,
        /// The name that occurs twice.
        name: String,
        /// Place of the first that has the name, in declared order, from 0.
        first: usize,
        /// Place of the second that has the name, in declared order, from 0.
        second: usize,
    },
    /// A buffer has the name of a parameter, or asks for something that only parameters have.
    #[error("buffer `{buffer}`: {problem}")]
    InvalidBuffer {
        /// Name of the buffer.
        buffer: String,
        /// The reason why it is refused.
        problem: BufferProblem,
    },
    /// [Statistics](crate::Statistics) have no channel.
    #[error("statistics `{statistics}` have 0 channels")]
    NoChannels {
        /// Their name.
        statistics: String,
    },
    /// A [setting](crate::ModelSpec::setting) is stated twice.
    #[error("setting `{name}` is stated twice: {} and {}", values[0], values[1])]
    DuplicateSetting {
        /// Name of the setting.
        name: String,
        /// The two values, in the order in which they are stated.
        values: [String; 2],
    },
    /// A dim of a parameter has size zero.
    #[error("parameter `{param}` of shape {shape:?}: dim {dim} has size 0")]
    ZeroDim {
        /// Name of the parameter.
        param: String,
        /// Its shape, in elements.
        shape: Vec<usize>,
        /// The first dim of size zero.
        dim: usize,
    },
    /// A parameter asks for pieces of zero rows, or for rows without having a dim 0.
    #[error(
        "parameter `{param}` of shape {shape:?} cannot be cut into pieces of {rows} rows: \
         that needs at least 1 row and 1 dim"
    )]
    InvalidRows {
        /// Name of the parameter.
        param: String,
        /// Its shape, in elements.
        shape: Vec<usize>,
        /// Rows of a piece, as asked for.
        rows: usize,
    },
    /// A parameter asks for blocks of zero elements.
    #[error("parameter `{param}` cannot be cut into blocks of 0 elements: that needs at least 1")]
    InvalidBlocks {
        /// Name of the parameter.
        param: String,
    },
    /// A parameter is not the stack of matrices that it [declares](crate::Param::matrices).
    #[error(
        "parameter `{param}` of shape {shape:?} is not a stack of matrices, {matrices}: these have another number of elements"
    )]
    InvalidMatrices {
        /// Name of the parameter.
        param: String,
        /// Its shape, in elements.
        shape: Vec<usize>,
        /// The matrices, as declared.
        matrices: Matrices,
    },
    /// A parameter is updated as whole matrices, and has neither two dims nor
    /// [declared](crate::Param::matrices) matrices.
    #[error(
        "parameter `{param}` of shape {shape:?} is no matrix: declare it with `matrices`, or update it by another optimizer"
    )]
    NoMatrices {
        /// Name of the parameter.
        param: String,
        /// Its shape, in elements.
        shape: Vec<usize>,
    },
    /// A parameter has optimizer state that cannot be counted.
    #[error(
        "parameter `{param}` cannot keep {state}: the maximum is 1024 f32 an element, and a block has at least 1 element"
    )]
    InvalidState {
        /// Name of the parameter.
        param: String,
        /// The state, as declared.
        state: State,
    },
    /// A unit is gathered for the forward alone, and has a trainable parameter.
    #[error(
        "unit `{unit}` is gathered for the forward alone, and its parameter `{param}` is trained: freeze it, or gather the \
         unit for the backward too"
    )]
    TrainedForwardOnly {
        /// Name of the unit.
        unit: String,
        /// Name of its first trainable parameter.
        param: String,
    },
    /// A unit [computes](crate::Unit::compute_in) in a dtype in which no training computes.
    #[error("unit `{unit}` computes in {dtype}: expected f32, f16 or bf16")]
    UnitDType {
        /// Name of the unit.
        unit: String,
        /// The dtype, as declared.
        dtype: DType,
    },
    /// A parameter cannot be [stored](crate::Param::stored_in) as it says.
    #[error("parameter `{param}`, stored in {dtype}: {problem}")]
    InvalidStorage {
        /// Name of the parameter.
        param: String,
        /// The dtype in which it should be stored.
        dtype: DType,
        /// The reason why that is refused.
        problem: StorageProblem,
    },
    /// A tie does not lead from a new name to a parameter.
    #[error("tie `{alias}` -> `{target}`: {problem}")]
    InvalidTie {
        /// The other name.
        alias: String,
        /// The name of the parameter that the alias should stand for.
        target: String,
        /// The reason why the tie is invalid.
        problem: TieProblem,
    },
    /// A unit or a model, with its padding, is larger than any machine's memory.
    #[error("{what} takes {elements} elements with its padding, more than {limit}")]
    TooLarge {
        /// The part that is too large: "unit `h.0`", "the model".
        what: String,
        /// Its elements, padding included; `u64::MAX` means that many or more.
        elements: u64,
        /// The largest number of elements that a plan accepts.
        limit: u64,
    },
    /// Optimizer state is divided over the world, and ranks share full copies.
    #[error(
        "state over the world with one full copy per process: a replica updates its slice of a \
         shard alone; take a full copy per rank, or state over the shards"
    )]
    SharedCopies,
    /// Collectives cannot move parameters or gradients in this dtype.
    #[error("{option} = {dtype}: expected f32, f16 or bf16")]
    UnsupportedDType {
        /// The option: "param_dtype" or "reduce_dtype".
        option: &'static str,
        /// The dtype, as given.
        dtype: DType,
    },
}

/// The reason why a tie is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TieProblem {
    /// No parameter has the target's name.
    UnknownTarget,
    /// The target is itself an alias.
    TargetIsAlias,
    /// The alias and the target are the same name.
    Itself,
    /// The alias is the name of a parameter.
    AliasIsParameter,
    /// The alias is the name of a buffer.
    AliasIsBuffer,
    /// The alias is tied already.
    AliasIsTaken,
}

impl fmt::Display for TieProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::UnknownTarget => "no parameter has the target's name",
            Self::TargetIsAlias => {
                "the target is an alias: tie to the parameter that it stands for"
            }
            Self::Itself => "a name cannot stand for itself",
            Self::AliasIsParameter => "a parameter has the alias as its own name",
            Self::AliasIsBuffer => "a buffer has the alias as its own name",
            Self::AliasIsTaken => "the alias is tied already",
        })
    }
}

/// The reason why a buffer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferProblem {
    /// A parameter has the same name.
    NameOfParameter,
    /// It is marked as trainable.
    Trainable,
    /// It declares a dtype in which it is stored: a buffer is in f32.
    Stored,
    /// It declares pieces or matrices: a buffer is whole on each rank.
    Cut,
    /// It is one of the buffers of a unit, and was not made by
    /// [`Param::buffer`](crate::Param::buffer).
    WithoutRule,
    /// It is one of the parameters of a unit: [`Unit::param`](crate::Unit::param) finds its place.
    AmongParameters,
}

impl fmt::Display for BufferProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::NameOfParameter => "a parameter has the same name",
            Self::Trainable => "it is marked as trainable, and no gradient reaches a buffer",
            Self::Stored => "it is to be stored in another dtype, and buffers are in f32",
            Self::WithoutRule => {
                "it is among the buffers of a unit, and was not made by `Param::buffer`"
            }
            Self::AmongParameters => "it is among the parameters of a unit",
            Self::Cut => "it is to be cut, or seen as matrices, and a buffer is whole on each rank",
        })
    }
}

/// The reason why a parameter cannot be stored as it says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StorageProblem {
    /// The parameter is trainable.
    Trainable,
    /// The dtype is neither f16 nor bf16.
    DType,
    /// This frozen parameter of the same unit is stored in another way.
    Beside(String),
    /// The plan gathers the unit in this dtype.
    Gathered(DType),
}

impl fmt::Display for StorageProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trainable => f.pad("it is trained, which needs an f32 master: mark it `frozen`"),
            Self::DType => f.pad("expected f16 or bf16; f32 needs no `stored_in`"),
            Self::Beside(other) => {
                write!(
                    f,
                    "`{other}` of the same unit is frozen, and stored in another way: store all frozen parameters of a unit alike"
                )
            }
            Self::Gathered(dtype) => {
                write!(
                    f,
                    "its unit is gathered in {dtype}: set param_dtype, or `compute_in` of the \
                     unit, to the dtype in which it is stored, or do not use `stored_in`"
                )
            }
        }
    }
}
