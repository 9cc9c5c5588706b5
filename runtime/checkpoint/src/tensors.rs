//! The tensors of a generation, their chunks and its files; the check that chunks cover a tensor
//! exactly once, and lie inside their files.

use std::collections::BTreeMap;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use crate::bounds;
use crate::hash::Hash;

/// The most bytes of a chunk: a reader reads and hashes this much to get at one element.
pub(crate) const CHUNK_BYTES: usize = 8 << 20;

/// A file of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the directory.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The hash of the whole file.
    pub hash: Hash,
}

/// A tensor of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its global shape, of at most 64 dims.
    #[serde(deserialize_with = "bounds::shape")]
    pub shape: Vec<u64>,
    /// The dtype of its elements.
    pub dtype: Dtype,
    /// Its chunks, in order of offset. They cover the tensor exactly once.
    pub chunks: Vec<Chunk>,
}

/// Consecutive elements of a tensor, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// The first element, in row-major order.
    pub offset: u64,
    /// The number of elements.
    pub len: u64,
    /// The index of its file in [`Manifest::files`](crate::Manifest::files).
    pub file: u64,
    /// The position of its first byte in the file.
    pub begin: u64,
    /// The position after its last byte.
    pub end: u64,
    /// The hash of these bytes.
    pub hash: Hash,
}

impl TensorEntry {
    /// The number of its elements; `None` if it does not fit a `u64`.
    #[must_use]
    pub fn numel(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size))
    }

    /// The bytes of an element; `None` if an element is not a whole number of bytes.
    #[must_use]
    pub fn element_bytes(&self) -> Option<u64> {
        let bits = self.dtype.bitsize() as u64;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

/// Checks a tensor's chunks: they are in order, without a gap or an overlap, and each has as many bytes in its file as its
/// elements need.
///
/// # Errors
/// The problem, in words.
pub(crate) fn check(tensor: &TensorEntry, files: &[FileEntry]) -> Result<(), String> {
    let numel = tensor.numel().ok_or_else(|| format!("shape {:?} is too large", tensor.shape))?;
    let bytes = tensor
        .element_bytes()
        .ok_or_else(|| format!("an element of {} is not a whole number of bytes", tensor.dtype))?;
    let mut covered = 0;
    for chunk in &tensor.chunks {
        if chunk.offset != covered {
            let wrong = if chunk.offset > covered { "missing" } else { "there twice" };
            let [from, to] = [covered.min(chunk.offset), covered.max(chunk.offset)];
            return Err(format!("elements {from} to {to} are {wrong}"));
        }
        check_place(chunk, files, bytes)?;
        covered = chunk.offset + chunk.len;
    }
    match covered {
        _ if covered == numel => Ok(()),
        _ if covered < numel => Err(format!("elements {covered} to {numel} are missing")),
        _ => Err(format!("its chunks have {covered} elements, its shape has {numel}")),
    }
}

fn check_place(chunk: &Chunk, files: &[FileEntry], element_bytes: u64) -> Result<(), String> {
    let file = usize::try_from(chunk.file).ok().and_then(|index| files.get(index));
    let file = file.ok_or_else(|| {
        format!("a chunk names file index {}, but there are {} files", chunk.file, files.len())
    })?;
    let begin = chunk.begin;
    let end = chunk.end;
    if end < begin || end > file.bytes {
        return Err(format!(
            "a chunk is in bytes {begin} to {end} of the {} bytes of {}",
            file.bytes, file.name
        ));
    }
    if end - begin > CHUNK_BYTES as u64 {
        return Err(format!("a chunk has {} bytes, more than {CHUNK_BYTES}", end - begin));
    }
    let fits = chunk.len.checked_mul(element_bytes) == Some(end - begin);
    let adds_up = chunk.offset.checked_add(chunk.len).is_some();
    if fits && adds_up && chunk.len > 0 {
        return Ok(());
    }
    Err(format!(
        "a chunk of {} elements from {} has {} bytes",
        chunk.len,
        chunk.offset,
        end - begin
    ))
}

/// Checks that the chunks of each file have at most as many bytes as the file: a small file cannot stand for large tensors.
/// [`check`] has passed for each tensor.
///
/// # Errors
/// The problem, in words.
pub(crate) fn check_files(
    files: &[FileEntry],
    tensors: &BTreeMap<String, TensorEntry>,
) -> Result<(), String> {
    let mut held = vec![0_u64; files.len()];
    for chunk in tensors.values().flat_map(|tensor| &tensor.chunks) {
        let file = usize::try_from(chunk.file).expect("a checked chunk names a file of the list");
        held[file] = held[file].saturating_add(chunk.end - chunk.begin);
    }
    let too_many = files.iter().zip(held).find(|(file, held)| *held > file.bytes);
    too_many.map_or(Ok(()), |(FileEntry { name, bytes, .. }, held)| {
        Err(format!("its chunks have {held} bytes in {name}, a file of {bytes} bytes"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileEntry {
        FileEntry { name: "r".to_owned(), bytes: 48, hash: Hash::of(b"") }
    }

    fn chunk(offset: u64, len: u64) -> Chunk {
        Chunk {
            offset,
            len,
            file: 0,
            begin: 4 * offset,
            end: 4 * (offset + len),
            hash: Hash::of(b""),
        }
    }

    fn wrong(shape: &[u64], chunks: Vec<Chunk>) -> String {
        let tensor = TensorEntry { shape: shape.to_vec(), dtype: Dtype::F32, chunks };
        check(&tensor, &[file()]).map_or_else(|wrong| wrong, |()| "nothing".to_owned())
    }

    #[test]
    fn a_tensor_is_covered_once() {
        assert_eq!(wrong(&[3, 4], vec![chunk(0, 5), chunk(5, 7)]), "nothing");
        assert_eq!(wrong(&[], vec![chunk(0, 1)]), "nothing");
        assert_eq!(wrong(&[0, 7], vec![]), "nothing");
        assert_eq!(wrong(&[12], vec![chunk(0, 5), chunk(6, 6)]), "elements 5 to 6 are missing");
        assert_eq!(wrong(&[12], vec![chunk(0, 5), chunk(4, 8)]), "elements 4 to 5 are there twice");
        assert_eq!(wrong(&[12], vec![chunk(0, 5)]), "elements 5 to 12 are missing");
        assert_eq!(
            wrong(&[11], vec![chunk(0, 12)]),
            "its chunks have 12 elements, its shape has 11"
        );
        assert_eq!(wrong(&[12], vec![]), "elements 0 to 12 are missing");
    }

    #[test]
    fn a_chunk_is_in_its_file() {
        let with = |chunk| wrong(&[5], vec![chunk]);
        assert_eq!(
            with(Chunk { file: 1, ..chunk(0, 5) }),
            "a chunk names file index 1, but there are 1 files"
        );
        assert_eq!(
            with(Chunk { end: 52, ..chunk(0, 5) }),
            "a chunk is in bytes 0 to 52 of the 48 bytes of r"
        );
        assert_eq!(
            with(Chunk { begin: 30, ..chunk(0, 5) }),
            "a chunk is in bytes 30 to 20 of the 48 bytes of r"
        );
        assert_eq!(
            with(Chunk { end: 16, ..chunk(0, 5) }),
            "a chunk of 5 elements from 0 has 16 bytes"
        );
        assert_eq!(
            with(Chunk { len: 1 << 62, ..chunk(0, 5) }),
            format!("a chunk of {} elements from 0 has 20 bytes", 1_u64 << 62)
        );
        assert_eq!(wrong(&[0], vec![chunk(0, 0)]), "a chunk of 0 elements from 0 has 0 bytes");
    }

    #[test]
    fn a_chunk_is_no_larger_than_a_reader_has_room_for() {
        let file = FileEntry { bytes: 1 << 40, ..file() };
        let chunk = Chunk { begin: 0, end: 1 << 40, ..chunk(0, 1 << 38) };
        let tensor = TensorEntry { shape: vec![1 << 38], dtype: Dtype::F32, chunks: vec![chunk] };
        let told = "a chunk has 1099511627776 bytes, more than 8388608";
        assert_eq!(check(&tensor, &[file]), Err(told.to_owned()));
    }

    #[test]
    fn what_no_number_holds_is_refused() {
        assert_eq!(
            wrong(&[1 << 40, 1 << 40], vec![]),
            "shape [1099511627776, 1099511627776] is too large"
        );
    }
}
