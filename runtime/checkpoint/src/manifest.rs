//! The manifest: what a generation holds, and where.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::Error;
use crate::hash::Hash;
use crate::name::is_plain;
use crate::tiles;

/// The format that this program writes, and the only one that it reads.
pub(crate) const FORMAT: u64 = 1;

/// Bytes of a manifest at the most: what a reader takes from a file that is no manifest.
pub(crate) const MOST_BYTES: u64 = 256 << 20;

/// Bytes of a chunk at the most: what is read and hashed to get at one element.
pub(crate) const CHUNK_BYTES: usize = 8 << 20;

/// Counts at the most: there is room to count on.
const MOST_COUNTED: u64 = u64::MAX >> 1;

/// What a generation holds, but for its files and tensors: what the writer of the manifest says.
#[derive(Clone, Debug, PartialEq)]
pub struct Head {
    /// Steps that an optimizer has gone through.
    pub step: u64,
    /// The mesh of the ranks that wrote it. No reader needs it.
    pub mesh: MeshShape,
    /// What goes from step to step beside parameters.
    pub training: Training,
    /// The optimizer, if its state is there.
    pub optimizer: Option<OptimizerHead>,
    /// Whatever the program needs to go on: a data cursor, seeds.
    pub user: serde_json::Value,
}

impl Head {
    /// That of a model of one rank without an optimizer.
    #[must_use]
    pub fn of_step(step: u64) -> Self {
        Self {
            step,
            mesh: MeshShape { replicate: 1, shard: 1 },
            training: Training { loss_scale: None, weight_hint: 0 },
            optimizer: None,
            user: serde_json::Value::Null,
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

/// What goes from step to step beside parameters and the state of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Training {
    /// By what losses are multiplied in the next step, where that changes.
    pub loss_scale: Option<LossScaleHead>,
    /// The largest weight of a microbatch in the last step, on any rank.
    pub weight_hint: u64,
}

/// A loss scale that changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScaleHead {
    /// By what losses are multiplied in the next step: a power of two.
    pub value: f64,
    /// Steps since that has changed.
    pub steps_since_change: u64,
}

/// An optimizer, but for its state of each element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerHead {
    /// Which one.
    pub kind: String,
    /// With what it was made.
    pub options: serde_json::Value,
    /// Updates that each parameter has had.
    pub updates: BTreeMap<String, u64>,
}

/// What a generation holds, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: u64,
    /// Steps that an optimizer has gone through.
    pub step: u64,
    /// The mesh of the ranks that wrote it.
    pub mesh: MeshShape,
    /// What goes from step to step beside parameters.
    pub training: Training,
    /// The optimizer, if its state is there.
    pub optimizer: Option<OptimizerHead>,
    /// Whatever the program needs to go on.
    pub user: serde_json::Value,
    /// By the number that chunks have of them.
    pub files: Vec<FileEntry>,
    /// By name.
    pub tensors: BTreeMap<String, TensorEntry>,
}

/// A file of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the directory.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Of all of it.
    pub hash: Hash,
}

/// A tensor of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Of its elements.
    pub dtype: Dtype,
    /// In the order of their offsets: they cover it once.
    pub chunks: Vec<Chunk>,
}

/// Consecutive elements of a tensor, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The first element, in row-major order.
    pub offset: u64,
    /// How many there are.
    pub len: u64,
    /// Which file.
    pub file: u64,
    /// The first byte there.
    pub begin: u64,
    /// Behind the last byte.
    pub end: u64,
    /// Of these bytes.
    pub hash: Hash,
}

impl TensorEntry {
    /// How many elements it has; `None` if no u64 holds that.
    #[must_use]
    pub fn numel(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size))
    }

    /// Bytes of an element; `None` where an element is no whole number of them.
    #[must_use]
    pub fn element_bytes(&self) -> Option<u64> {
        let bits = self.dtype.bitsize() as u64;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// A manifest as it is in its file, or a note: the value's very bytes, and their hash.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed<'a> {
    hash: Hash,
    #[serde(borrow)]
    checkpoint: &'a RawValue,
}

/// What is looked at before anything else.
#[derive(Deserialize)]
struct Versioned {
    format: u64,
}

/// A value with the hash of its bytes, as JSON.
pub(crate) fn seal(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let value = serde_json::value::to_raw_value(value)?;
    let hash = Hash::of(value.get().as_bytes());
    serde_json::to_vec(&Sealed { hash, checkpoint: &value })
}

/// The text of a value whose bytes have the hash that is told.
pub(crate) fn unseal<'a>(path: &Path, bytes: &'a [u8]) -> Result<&'a str, Error> {
    let sealed: Sealed<'_> =
        serde_json::from_slice(bytes).map_err(|error| Error::manifest(path, error))?;
    let (text, found) = (sealed.checkpoint.get(), Hash::of(sealed.checkpoint.get().as_bytes()));
    if found != sealed.hash {
        let problem = format!("its hash is {found}, and it says {}", sealed.hash);
        return Err(Error::manifest(path, problem));
    }
    Ok(text)
}

impl Manifest {
    /// That of a generation, which is checked as a reader would.
    ///
    /// # Errors
    /// [`Error::Manifest`], with the path of the file that it is meant for.
    pub(crate) fn new(
        path: &Path,
        head: Head,
        (files, tensors): (Vec<FileEntry>, BTreeMap<String, TensorEntry>),
    ) -> Result<Self, Error> {
        let Head { step, mesh, training, optimizer, user } = head;
        let format = FORMAT;
        let manifest = Self { format, step, mesh, training, optimizer, user, files, tensors };
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Reads a manifest from the bytes of its file.
    ///
    /// # Errors
    /// [`Error::Version`] of another format; [`Error::Manifest`] if the hash differs, a field is missing, left over or makes no sense, or
    /// tensors are not covered.
    pub fn decode(path: &Path, bytes: &[u8]) -> Result<Self, Error> {
        let text = unseal(path, bytes)?;
        let Versioned { format } =
            serde_json::from_str(text).map_err(|error| Error::manifest(path, error))?;
        if format != FORMAT {
            return Err(Error::Version { path: path.to_owned(), found: format, known: FORMAT });
        }
        let manifest: Self =
            serde_json::from_str(text).map_err(|error| Error::manifest(path, error))?;
        manifest.check(path)?;
        Ok(manifest)
    }

    /// The bytes of its file. The same manifest has the same bytes.
    ///
    /// # Errors
    /// [`Error::Manifest`] if no reader would take them: what the program saves is too large, or too deep.
    pub fn encode(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let bytes = seal(self).map_err(|error| Error::manifest(path, error))?;
        let size = bytes.len() as u64;
        if size > MOST_BYTES {
            let problem = format!("it would have {size} bytes, {MOST_BYTES} are the most");
            return Err(Error::manifest(path, problem));
        }
        Self::decode(path, &bytes)?;
        Ok(bytes)
    }

    /// Numbers to which a run adds.
    fn counts(&self) -> impl Iterator<Item = u64> {
        let updates = self.optimizer.iter().flat_map(|optimizer| optimizer.updates.values());
        let since = self.training.loss_scale.map(|scale| scale.steps_since_change);
        updates.copied().chain(since).chain([self.step])
    }

    fn check(&self, path: &Path) -> Result<(), Error> {
        let names: BTreeSet<&str> = self.files.iter().map(|file| &*file.name).collect();
        if names.len() < self.files.len() {
            return Err(Error::manifest(path, "it has a file twice"));
        }
        if let Some(file) = self.files.iter().find(|file| !is_plain(&file.name)) {
            return Err(Error::manifest(path, format!("`{}` is no name of a file", file.name)));
        }
        if let Some(count) = self.counts().find(|count| *count > MOST_COUNTED) {
            return Err(Error::manifest(path, format!("a count of {count}")));
        }
        if let Some(scale) = self.training.loss_scale.filter(|scale| !is_scale(scale.value)) {
            return Err(Error::manifest(path, format!("a loss scale of {}", scale.value)));
        }
        for (name, tensor) in &self.tensors {
            tiles::check(tensor, &self.files)
                .map_err(|problem| Error::manifest(path, format!("tensor `{name}`: {problem}")))?;
        }
        Ok(())
    }
}

fn is_scale(value: f64) -> bool {
    value.is_normal() && value > 0.0
}
