//! A case, from its folder to its verdict.

use std::path::Path;

use hsdp::{DType, Mesh, ModelOptions, ModelSpec, Plan};
use hsdp_train::memory::{Limit, Need};
use hsdp_train::{file, threads};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{CaseError, ReduceCase, Site, TrainCase, Verdict, VjpCase};

/// The most ranks of a case that is run with threads: every machine has room for them. A case with
/// more is skipped.
pub const MOST_RANKS: usize = 128;

/// The most bytes of a `case.json`.
const MAX_JSON: u64 = 4 << 20;

/// The most microbatches of a step.
const MAX_MICROBATCHES: usize = 1024;

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
    /// [`CaseError`], if a file is missing or broken, a tensor is missing or has another shape than
    /// the case says, or the kind is not known.
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

    /// Runs it on the host, with a thread for each rank that it needs. It is skipped if those are
    /// more than [`MOST_RANKS`].
    #[must_use]
    pub fn run(&self) -> Verdict {
        self.run_on(Site::default())
    }

    /// As [`run`](Self::run), there. Collectives with gradients, which have no model, are skipped
    /// where that is not the host.
    #[must_use]
    pub fn run_on(&self, site: Site) -> Verdict {
        let ranks = self.world_size();
        if let Err(problem) = threads::check(ranks, MOST_RANKS) {
            return Verdict::Skipped(problem);
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

/// Checks the number of microbatches of a step.
pub(super) fn check_microbatches(count: usize) -> Result<(), String> {
    match (1..=MAX_MICROBATCHES).contains(&count) {
        true => Ok(()),
        false => Err(format!("microbatches is {count}: expected 1 to {MAX_MICROBATCHES}")),
    }
}

/// Checks that the memory of all ranks is within that of this process: of their models as planned,
/// and of `own` on each rank.
pub(super) fn check_memory(
    spec: ModelSpec,
    options: &ModelOptions,
    own: &[(&str, u64)],
) -> Result<(), String> {
    let plan = Plan::new(spec, options.mesh, options.plan_options());
    let plan = plan.map_err(|error| error.to_string())?;
    // More ranks are skipped.
    let ranks = options.mesh.world_size().min(MOST_RANKS) as u64;
    let model = [("the model", plan.memory().total().get())];
    let of_rank = own.iter().chain(&model);
    let of_all = of_rank.fold(Need::default(), |need, (part, bytes)| {
        need.with(format!("{part} of {ranks} ranks"), bytes.saturating_mul(ranks))
    });
    of_all.check(Limit::of_process()).map_err(|error| error.to_string())
}

/// A mesh as a case spells it: replicate, then shard.
pub(super) fn mesh([replicate, shard]: [usize; 2]) -> Result<Mesh, String> {
    Mesh::new(replicate, shard).map_err(|error| error.to_string())
}

/// The dtype of parameters or gradients in a field.
pub(super) fn real_dtype(field: &str, text: &str) -> Result<DType, String> {
    DType::of_training(text).map_err(|error| format!("{field}: {error}"))
}

/// Reads a JSON file, and ignores unknown fields.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, CaseError> {
    let text = file::read_text(path, MAX_JSON)?;
    serde_json::from_str(&text).map_err(|source| CaseError::Json { path: path.into(), source })
}
