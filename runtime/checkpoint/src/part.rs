//! The data of one writer: a safetensors file, and the note that describes it.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};

use crate::bounds;
use crate::error::Error;
use crate::files::{Files, Sink, write_synced};
use crate::hash::Hash;
use crate::header;
use crate::manifest::{seal, unseal};
use crate::tensors::{CHUNK_BYTES, Chunk, FileEntry};

/// The most elements of a chunk.
const CHUNK_ELEMENTS: usize = CHUNK_BYTES / size_of::<f32>();

/// One writer of a generation. Each writer writes one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer {
    /// Its index, from 0.
    pub index: usize,
    /// The number of writers of the generation.
    pub of: usize,
}

impl Writer {
    pub(crate) fn file(self) -> String {
        format!("{}.safetensors", self.stem())
    }

    pub(crate) fn note(self) -> String {
        format!("{}.part.json", self.stem())
    }

    fn stem(self) -> String {
        format!("r{:05}-of-{:05}", self.index, self.of)
    }
}

/// The consecutive elements of one tensor that a writer has.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    /// The tensor's name.
    pub tensor: &'a str,
    /// The global shape of the tensor.
    pub shape: &'a [u64],
    /// The first element, in row-major order.
    pub offset: u64,
    /// The elements, at least one. They are written as f32.
    pub values: Elements<'a>,
}

/// Elements in memory.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// f32.
    F32(&'a [f32]),
    /// f16, each of which is an f32, too.
    F16(&'a [f16]),
    /// bf16, each of which is an f32, too.
    BF16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    /// The number of elements.
    #[must_use]
    pub fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// A range of the elements, as f32.
    fn in_f32(self, range: Range<usize>) -> Cow<'a, [f32]> {
        match self {
            Self::F32(values) => Cow::Borrowed(&values[range]),
            Self::F16(values) => Cow::Owned(values[range].to_f32_vec()),
            Self::BF16(values) => Cow::Owned(values[range].to_f32_vec()),
        }
    }
}

impl<'a> From<&'a [f32]> for Elements<'a> {
    fn from(values: &'a [f32]) -> Self {
        Self::F32(values)
    }
}

/// A writer's note: its file, and the tensors in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WriterPart {
    /// Its file.
    pub(crate) file: FileEntry,
    /// The parts of tensors in the file.
    pub(crate) tensors: Vec<PartOfTensor>,
}

/// A writer's part of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PartOfTensor {
    /// Its name.
    pub(crate) tensor: String,
    /// Its global shape.
    #[serde(deserialize_with = "bounds::shape")]
    pub(crate) shape: Vec<u64>,
    /// Its chunks in this file. Their `file` is 0 here, since the number of the file is not known
    /// yet.
    pub(crate) chunks: Vec<Chunk>,
}

impl WriterPart {
    /// Writes a file and its note, and syncs both.
    ///
    /// # Errors
    /// [`Error::Tensor`] if two slices are of one tensor; [`Error::Io`].
    pub(crate) fn write(
        files: &dyn Files,
        directory: &Path,
        writer: Writer,
        slices: &[Slice<'_>],
    ) -> Result<(), Error> {
        let name = writer.file();
        let path = directory.join(&name);
        let beginning = beginning(slices)?;
        let mut hashed = Hashed::create(files, &path)?;
        hashed.write(&beginning)?;
        let tensors =
            slices.iter().map(|slice| hashed.write_slice(slice)).collect::<Result<_, _>>();
        let bytes = hashed.bytes;
        let hash = Hash::finish(&hashed.hasher);
        let part = Self { file: FileEntry { name, bytes, hash }, tensors: tensors? };
        hashed.sink.sync().map_err(Error::io("sync", hashed.path))?;
        let path = directory.join(writer.note());
        let note = seal(&part).map_err(|error| Error::manifest(&path, error))?;
        write_synced(files, &path, |write| write(&note))
    }

    /// Reads a note.
    ///
    /// # Errors
    /// [`Error::Manifest`] if it is not a valid note, or it is another writer's.
    pub(crate) fn decode(path: &Path, writer: Writer, bytes: &[u8]) -> Result<Self, Error> {
        let part: Self = serde_json::from_str(unseal(path, bytes)?)
            .map_err(|error| Error::manifest(path, error))?;
        if part.file.name == writer.file() {
            return Ok(part);
        }
        Err(Error::manifest(path, format!("it is the note of another file, {}", part.file.name)))
    }
}

/// The first bytes of the file: its header.
fn beginning(slices: &[Slice<'_>]) -> Result<Vec<u8>, Error> {
    let mut at = 0;
    let tensors = slices.iter().map(|slice| {
        let end = at + slice.values.len() * size_of::<f32>();
        let info =
            TensorInfo { dtype: Dtype::F32, shape: shape_of(slice), data_offsets: (at, end) };
        at = end;
        (slice.tensor.to_owned(), info)
    });
    header::encode(tensors.collect())
}

/// The tensor's own shape, if the slice is all of it.
fn shape_of(slice: &Slice<'_>) -> Vec<usize> {
    let shape: Option<Vec<usize>> =
        slice.shape.iter().map(|size| usize::try_from(*size).ok()).collect();
    match shape {
        Some(shape) if numel(&shape) == Some(slice.values.len()) => shape,
        _ => vec![slice.values.len()],
    }
}

fn numel(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |product, size| product.checked_mul(*size))
}

/// A file that is being written, with the hash and the number of its bytes so far.
struct Hashed<'a> {
    sink: Box<dyn Sink>,
    path: &'a Path,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<'a> Hashed<'a> {
    fn create(files: &dyn Files, path: &'a Path) -> Result<Self, Error> {
        let sink = files.create(path).map_err(Error::io("create", path))?;
        Ok(Self { sink, path, hasher: blake3::Hasher::new(), bytes: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.sink.write(bytes).map_err(Error::io("write", self.path))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Writes elements as little-endian bytes, chunk by chunk.
    fn write_slice(&mut self, slice: &Slice<'_>) -> Result<PartOfTensor, Error> {
        const { assert!(cfg!(target_endian = "little"), "elements are written as they lie") };
        let mut offset = slice.offset;
        let all = slice.values.len();
        let mut chunks = Vec::new();
        for start in (0..all).step_by(CHUNK_ELEMENTS) {
            let values = slice.values.in_f32(start..all.min(start + CHUNK_ELEMENTS));
            let bytes: &[u8] = bytemuck::cast_slice(&values);
            let begin = self.bytes;
            self.write(bytes)?;
            let len = values.len() as u64;
            let hash = Hash::of(bytes);
            chunks.push(Chunk { offset, len, file: 0, begin, end: self.bytes, hash });
            offset += len;
        }
        let tensor = slice.tensor.to_owned();
        let shape = slice.shape.to_vec();
        Ok(PartOfTensor { tensor, shape, chunks })
    }
}
