//! A case, from its folder to its verdict.

use std::fs;
use std::path::Path;

use hsdp::{DType, Mesh};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{CaseError, ReduceCase, TrainCase, Verdict};

/// A case that has been read: everything in it makes sense, and nothing has run.
#[derive(Debug)]
pub enum Case {
    /// Drives the reduction engine.
    Reduce(ReduceCase),
    /// Trains a GPT.
    Train(TrainCase),
    /// Would drive the differentiable collectives.
    Vjp {
        /// Its name.
        name: String,
    },
}

/// What every kind of case has.
#[derive(Deserialize)]
struct Head {
    kind: String,
    name: String,
}

impl Case {
    /// Reads the case in the folder `dir`.
    ///
    /// # Errors
    /// [`CaseError`], if a file is missing or broken, a tensor is missing or has another shape than the
    /// case says, or the kind is not known.
    pub fn read(dir: &Path) -> Result<Self, CaseError> {
        let path = dir.join("case.json");
        let head: Head = read_json(&path)?;
        match head.kind.as_str() {
            "reduce" => ReduceCase::read(dir).map(Self::Reduce),
            "train" => TrainCase::read(dir).map(Self::Train),
            "vjp" => Ok(Self::Vjp { name: head.name }),
            kind => Err(CaseError::senseless(
                path,
                format!("kind `{kind}` is not known: expected reduce, train or vjp"),
            )),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Reduce(case) => &case.name,
            Self::Train(case) => case.name(),
            Self::Vjp { name } => name,
        }
    }

    /// Runs it, with a thread for each rank that it needs.
    #[must_use]
    pub fn run(&self) -> Verdict {
        match self {
            Self::Reduce(case) => case.run(),
            Self::Train(case) => case.run(),
            Self::Vjp { .. } => {
                Verdict::Skipped("there are no differentiable collectives yet".to_owned())
            }
        }
    }
}

/// A mesh as a case spells it: replicate, then shard.
pub(super) fn mesh([replicate, shard]: [usize; 2]) -> Result<Mesh, String> {
    Mesh::new(replicate, shard).map_err(|error| error.to_string())
}

/// A dtype of parameters or gradients by its name.
pub(super) fn real_dtype(field: &str, text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Ok(dtype),
        _ => Err(format!("{field} `{text}`: expected f32, bf16 or f16")),
    }
}

/// Reads a JSON file; fields that nobody asks for are ignored.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, CaseError> {
    let text =
        fs::read_to_string(path).map_err(|source| CaseError::Io { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| CaseError::Json { path: path.into(), source })
}
