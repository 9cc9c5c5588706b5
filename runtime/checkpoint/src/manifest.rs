//! The manifest: the contents of a generation, and where they lie.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::bounds;
use crate::error::Error;
use crate::hash::Hash;
use crate::name::{STATE, is_plain};
use crate::tensors::{self, FileEntry, TensorEntry};

/// The newest format that this program reads.
pub(crate) const FORMAT: u64 = WITH_BUFFERS;

/// The format of generations with all parameters.
const FIRST: u64 = 1;

/// The format of generations without the frozen parameters: it has [`Manifest::frozen_digest`].
const WITHOUT_FROZEN: u64 = 2;

/// The first format that has [`Training::applied_steps`], with all parameters or without the frozen
/// ones.
const WITH_APPLIED: u64 = 3;

/// The format of generations that state [`Manifest::settings`]. It has the fields of format 3,
/// too.
const WITH_SETTINGS: u64 = 4;

/// The format of generations with [`Manifest::buffers`]. It has the fields of format 3, and may
/// have settings.
const WITH_BUFFERS: u64 = 5;

/// The most bytes of a manifest or a note: those of the largest models on thousands of ranks.
/// CHECKPOINT.md counts them.
pub(crate) const MOST_BYTES: u64 = 256 << 20;

/// The largest count in a manifest, so that a run can go on counting without overflow.
const MOST_COUNTED: u64 = u64::MAX >> 1;

/// The contents of a manifest, except files and tensors. The writer of the manifest provides them.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// The number of optimizer steps so far.
    pub step: u64,
    /// The mesh of the ranks that wrote it. No reader needs it.
    pub mesh: MeshShape,
    /// The values that one step passes on to the next, besides parameters.
    pub training: TrainingHead,
    /// The optimizer, if its state is saved.
    pub optimizer: Option<OptimizerHead>,
    /// The program's own values, which it needs to go on: a data cursor, seeds. At most
    /// [`MOST_USER_BYTES`](crate::MOST_USER_BYTES) as JSON.
    pub user: serde_json::Value,
    /// The digest of the frozen parameters, if the files have the trainable parameters alone.
    pub frozen_digest: Option<u64>,
    /// Settings of the model's computation that no tensor shows, by name. At most
    /// [`MOST_USER_BYTES`](crate::MOST_USER_BYTES) as JSON.
    pub settings: BTreeMap<String, String>,
    /// The names of the tensors that are buffers of the model: no parameters, and no state.
    pub buffers: BTreeSet<String>,
}

impl Head {
    /// The head for a model of one rank without an optimizer.
    #[must_use]
    pub fn of_step(step: u64) -> Self {
        Self {
            step,
            mesh: MeshShape { replicate: 1, shard: 1 },
            training: TrainingHead { loss_scale: None, weight_hint: 0, applied_steps: None },
            optimizer: None,
            user: serde_json::Value::Null,
            frozen_digest: None,
            settings: BTreeMap::new(),
            buffers: BTreeSet::new(),
        }
    }
}

/// Ranks along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshShape {
    /// Along the replicate axis.
    pub replicate: u64,
    /// Along the shard axis.
    pub shard: u64,
}

/// The values that one step passes on to the next, besides parameters and optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingHead {
    /// The loss scale, if it is dynamic.
    pub loss_scale: Option<LossScaleHead>,
    /// The largest weight of a microbatch in the last step, on any rank.
    pub weight_hint: u64,
    /// The number of steps whose update was applied: those of [`Manifest::step`] except the skipped
    /// ones. Formats 1 and 2 lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applied_steps: Option<u64>,
}

/// A dynamic loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScaleHead {
    /// The factor of losses in the next step: a power of two.
    pub value: f64,
    /// The number of steps since it last changed.
    pub steps_since_change: u64,
}

/// An optimizer, except its state of each element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerHead {
    /// The kind of optimizer, such as `adamw`.
    pub kind: String,
    /// The present options, with the learning rates that were set last.
    #[serde(deserialize_with = "bounds::value")]
    pub options: serde_json::Value,
    /// The options with which the program made it. Formats 1 and 2 lack them.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "bounds::optional_value"
    )]
    pub made_with: Option<serde_json::Value>,
    /// The number of updates so far, by parameter name.
    #[serde(deserialize_with = "bounds::unique")]
    pub updates: BTreeMap<String, u64>,
    /// Whether the next update decides which optimizer gets the parameters without state. It does
    /// after a load of the fitting part of a checkpoint, until the first update.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_open: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The contents of a generation, and where they lie.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: u64,
    /// The number of optimizer steps so far.
    pub step: u64,
    /// The mesh of the ranks that wrote it.
    pub mesh: MeshShape,
    /// The values that one step passes on to the next, besides parameters.
    pub training: TrainingHead,
    /// The optimizer, if its state is saved.
    #[serde(deserialize_with = "bounds::optimizer")]
    pub optimizer: Option<OptimizerHead>,
    /// The program's own values, which it needs to go on.
    #[serde(deserialize_with = "bounds::value")]
    pub user: serde_json::Value,
    /// The digest of the frozen parameters, if the files have the trainable parameters alone.
    /// CHECKPOINT.md defines it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_digest: Option<u64>,
    /// Settings of the model's computation that no tensor shows, by name. Empty where the model
    /// stated none, and in formats 1 to 3, which lack them.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "bounds::settings"
    )]
    pub settings: BTreeMap<String, String>,
    /// The names of the tensors that are buffers of the model: values that no gradient reaches and
    /// that the forward writes. Empty where the model has none, and in formats 1 to 4, which lack
    /// them.
    #[serde(
        default,
        skip_serializing_if = "BTreeSet::is_empty",
        deserialize_with = "bounds::names"
    )]
    pub buffers: BTreeSet<String>,
    /// The files. [`Chunk::file`](crate::Chunk::file) is an index into this list.
    pub files: Vec<FileEntry>,
    /// The tensors, by name.
    #[serde(deserialize_with = "bounds::unique")]
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// The content of a manifest's or a note's file: the exact bytes of the value, and their hash.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedJson<'a> {
    hash: Hash,
    #[serde(borrow)]
    checkpoint: &'a RawValue,
}

/// The field that a reader checks before all others.
#[derive(Deserialize)]
struct Versioned {
    format: u64,
}

/// A value as JSON, with the hash of its bytes.
pub(crate) fn seal(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let value = serde_json::value::to_raw_value(value)?;
    let hash = Hash::of(value.get().as_bytes());
    serde_json::to_vec(&SealedJson { hash, checkpoint: &value })
}

/// The text of a sealed value, once its bytes have the recorded hash.
pub(crate) fn unseal<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, Error> {
    let sealed: SealedJson<'_> =
        serde_json::from_slice(bytes).map_err(|error| Error::manifest(path, error))?;
    let text = sealed.checkpoint.get();
    let found = Hash::of(sealed.checkpoint.get().as_bytes());
    if found != sealed.hash {
        let problem = format!("its hash is {found}, but it records {}", sealed.hash);
        return Err(Error::manifest(path, problem));
    }
    Ok(text)
}

impl Manifest {
    /// Makes the manifest of a generation.
    pub(crate) fn new(
        head: Head,
        files: Vec<FileEntry>,
        tensors: BTreeMap<String, TensorEntry>,
    ) -> Self {
        let Head { step, mesh, training, optimizer, user, frozen_digest, settings, buffers } = head;
        let format = match (training.applied_steps, frozen_digest) {
            _ if !buffers.is_empty() => WITH_BUFFERS,
            _ if !settings.is_empty() => WITH_SETTINGS,
            (Some(_), _) => WITH_APPLIED,
            (None, Some(_)) => WITHOUT_FROZEN,
            (None, None) => FIRST,
        };
        Self {
            format,
            step,
            mesh,
            training,
            optimizer,
            user,
            frozen_digest,
            settings,
            buffers,
            files,
            tensors,
        }
    }

    /// Reads a manifest from the bytes of its file. `path` is for errors only.
    ///
    /// # Errors
    /// [`Error::Version`] if a newer version of this program wrote it; [`Error::Manifest`] if the
    /// hash differs, a field is missing, unknown, invalid or too large, or chunks do not cover a
    /// tensor exactly once.
    pub fn decode(path: &Path, bytes: &[u8]) -> Result<Self, Error> {
        let text = unseal(path, bytes)?;
        let Versioned { format } =
            serde_json::from_str(text).map_err(|error| Error::manifest(path, error))?;
        if format > FORMAT {
            return Err(Error::Version { path: path.to_owned(), found: format, known: FORMAT });
        }
        if format == 0 {
            return Err(Error::manifest(path, "its format is 0; the first one was 1"));
        }
        let manifest: Self =
            serde_json::from_str(text).map_err(|error| Error::manifest(path, error))?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Returns the bytes of its file. Equal manifests have equal bytes. `path` is for errors only.
    ///
    /// # Errors
    /// [`Error::Manifest`] if a reader would refuse them: the program's own values are too large,
    /// or nested too deeply.
    pub fn encode(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let bytes = seal(self).map_err(|error| Error::manifest(path, error))?;
        let size = bytes.len() as u64;
        if size > MOST_BYTES {
            let problem = format!("it would have {size} bytes, more than {MOST_BYTES}");
            return Err(Error::manifest(path, problem));
        }
        Self::decode(path, &bytes)?;
        Ok(bytes)
    }

    /// Returns the number of steps whose update was applied. An older format does not record it.
    /// There the largest number of updates of a parameter counts, which no skipped step increases,
    /// or [`step`](Self::step) if the optimizer counts no updates.
    #[must_use]
    pub fn applied_steps(&self) -> u64 {
        let updates = self.optimizer.iter().flat_map(|optimizer| optimizer.updates.values());
        let counted = || updates.copied().max().map_or(self.step, |most| most.min(self.step));
        self.training.applied_steps.unwrap_or_else(counted)
    }

    /// The numbers that a run increases.
    fn counts(&self) -> impl Iterator<Item = u64> {
        let updates = self.optimizer.iter().flat_map(|optimizer| optimizer.updates.values());
        let since = self.training.loss_scale.map(|scale| scale.steps_since_change);
        updates.copied().chain(since).chain([self.step])
    }

    /// Checks that the manifest has the fields of its format.
    fn check_format(&self) -> Result<(), String> {
        let Self { format, step, .. } = *self;
        match self.settings.is_empty() {
            true if format == WITH_SETTINGS => {
                return Err(format!("its format is {format}, and settings are missing"));
            }
            false if format < WITH_SETTINGS => {
                return Err(format!(
                    "its format is {format}, and only format {WITH_SETTINGS} has settings"
                ));
            }
            _ => {}
        }
        match self.buffers.is_empty() {
            true if format >= WITH_BUFFERS => {
                return Err(format!("its format is {format}, and buffers are missing"));
            }
            false if format < WITH_BUFFERS => {
                return Err(format!(
                    "its format is {format}, and only format {WITH_BUFFERS} has buffers"
                ));
            }
            _ => {}
        }
        let made_with = self.optimizer.as_ref().and_then(|optimizer| optimizer.made_with.as_ref());
        if made_with.is_some() && format < WITH_APPLIED {
            return Err(format!(
                "its format is {format}, and only format {WITH_APPLIED} has made_with"
            ));
        }
        match self.training.applied_steps {
            Some(_) if format < WITH_APPLIED => {
                return Err(format!(
                    "its format is {format}, and only format {WITH_APPLIED} has applied_steps"
                ));
            }
            None if format >= WITH_APPLIED => {
                return Err(format!("its format is {format}, and applied_steps is missing"));
            }
            Some(applied) if applied > step => {
                return Err(format!("{applied} of {step} steps were applied"));
            }
            _ => {}
        }
        if format < WITH_APPLIED && self.frozen_digest.is_some() != (format == WITHOUT_FROZEN) {
            return Err(format!(
                "its format is {format}, and only format {WITHOUT_FROZEN} has a frozen_digest"
            ));
        }
        Ok(())
    }

    fn check(&self, path: &Path) -> Result<(), Error> {
        self.check_format().map_err(|problem| Error::manifest(path, problem))?;
        let names: BTreeSet<&str> = self.files.iter().map(|file| &*file.name).collect();
        if names.len() < self.files.len() {
            return Err(Error::manifest(path, "it lists a file twice"));
        }
        if let Some(file) = self.files.iter().find(|file| !is_plain(&file.name)) {
            return Err(Error::manifest(path, format!("`{}` is not a valid file name", file.name)));
        }
        if let Some(count) = self.counts().find(|count| *count > MOST_COUNTED) {
            return Err(Error::manifest(path, format!("count {count} is too large")));
        }
        if let Some(scale) = self.training.loss_scale.filter(|scale| !is_scale(scale.value)) {
            return Err(Error::manifest(
                path,
                format!("loss scale {} is not a positive normal number", scale.value),
            ));
        }
        let is_lacking =
            |name: &&String| name.starts_with(STATE) || !self.tensors.contains_key(&**name);
        if let Some(name) = self.buffers.iter().find(is_lacking) {
            let problem = format!("buffer `{}` is no tensor of the model", name.escape_debug());
            return Err(Error::manifest(path, problem));
        }
        for (name, tensor) in &self.tensors {
            tensors::check(tensor, &self.files).map_err(|problem| {
                Error::manifest(path, format!("tensor `{}`: {problem}", name.escape_debug()))
            })?;
        }
        tensors::check_files(&self.files, &self.tensors)
            .map_err(|problem| Error::manifest(path, problem))
    }
}

fn is_scale(value: f64) -> bool {
    value.is_normal() && value > 0.0
}
