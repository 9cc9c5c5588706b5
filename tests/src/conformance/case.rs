//! A case, from its folder to its verdict.

use std::fs;
use std::path::Path;

use hsdp::{DType, Mesh};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{CaseError, ReduceCase, Site, TrainCase, Verdict, VjpCase};

/// So many threads every machine has room for.
pub const MOST_RANKS: usize = 128;

/// A case that has been read: everything in it makes sense, and nothing has run.
#[derive(Debug)]
pub enum Case {
    /// Drives the reduction engine.
    Reduce(ReduceCase),
    /// Trains a GPT.
    Train(TrainCase),
    /// Drives a differentiable collective.
    Vjp(VjpCase),
}

/// The fields that every kind of case has first.
#[derive(Deserialize)]
struct Head {
    kind: String,
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
            "vjp" => VjpCase::read(dir).map(Self::Vjp),
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
            Self::Vjp(case) => case.name(),
        }
    }

    /// How many ranks it needs.
    #[must_use]
    pub fn world_size(&self) -> usize {
        match self {
            Self::Reduce(case) => case.mesh.world_size(),
            Self::Train(case) => case.world_size(),
            Self::Vjp(case) => case.world_size(),
        }
    }

    /// Runs it on the host, with a thread for each rank that it needs. It is skipped if those are more than [`MOST_RANKS`].
    #[must_use]
    pub fn run(&self) -> Verdict {
        self.run_on(Site::default())
    }

    /// As [`run`](Self::run), there. Collectives with gradients, which have no model, are skipped where that is not the host.
    #[must_use]
    pub fn run_on(&self, site: Site) -> Verdict {
        let ranks = self.world_size();
        if ranks > MOST_RANKS {
            return Verdict::Skipped(format!("{ranks} ranks: {MOST_RANKS} threads are the most"));
        }
        if let Some(most) = site.carrier.most_ranks().filter(|most| ranks > *most) {
            return Verdict::Skipped(format!("{ranks} ranks: there are {most} processes"));
        }
        match self {
            Self::Reduce(case) => case.run_on(site),
            Self::Train(case) => case.run_on(site),
            Self::Vjp(case) if site.placement == hsdp::Placement::Host => case.run_by(site.carrier),
            Self::Vjp(_) => Verdict::Skipped("a collective of values on the host".to_owned()),
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

/// Reads a JSON file, and ignores unknown fields.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, CaseError> {
    let text =
        fs::read_to_string(path).map_err(|source| CaseError::Io { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| CaseError::Json { path: path.into(), source })
}
