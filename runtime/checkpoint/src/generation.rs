//! Reading a generation.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;

use crate::error::Error;
use crate::files::{FileSource, ReadFiles, directory_of, read_whole};
use crate::hash::Hash;
use crate::manifest::{MOST_BYTES, Manifest};
use crate::name::MANIFEST;
use crate::tensors::{Chunk, FileEntry, TensorEntry};

/// Bytes per read when a whole file is hashed.
const BLOCK: usize = 1 << 20;

/// A generation whose manifest is intact, and whose files exist with the sizes that the manifest
/// says.
pub struct Generation {
    files: Arc<dyn ReadFiles>,
    path: PathBuf,
    manifest: Manifest,
    hash: Hash,
}

impl Generation {
    /// Opens the generation in a directory (R2).
    ///
    /// # Errors
    /// [`Error::Io`] if the manifest or a file cannot be opened, or is a link; the errors of
    /// [`Manifest::decode`]; [`Error::Truncated`] if a file has another size than the manifest
    /// says.
    pub fn open(files: Arc<dyn ReadFiles>, path: &Path) -> Result<Self, Error> {
        let at = path.join(MANIFEST);
        let bytes = read_whole(&*files, &at, MOST_BYTES).map_err(Error::io("read", &at))?;
        let manifest = Manifest::decode(&at, &bytes)?;
        let hash = Hash::of(&bytes);
        let generation = Self { files, path: path.to_owned(), manifest, hash };
        (0..generation.manifest.files.len())
            .try_for_each(|file| generation.source(file).map(drop))?;
        Ok(generation)
    }

    /// Replaces an error by [`Error::Removed`] if this generation has left its place.
    fn looked_at_again(&self, error: Error) -> Error {
        if error.is_damage() && !self.is_in_place() {
            return Error::Removed { path: self.path.clone() };
        }
        error
    }

    /// Returns whether the directory is still there, and no other generation has taken its place.
    fn is_in_place(&self) -> bool {
        let at = self.path.join(MANIFEST);
        match read_whole(&*self.files, &at, MOST_BYTES) {
            Ok(bytes) => Hash::of(&bytes) == self.hash || Manifest::decode(&at, &bytes).is_err(),
            Err(_) => is_listed(&*self.files, &self.path),
        }
    }

    /// Opens a file for one use. Many ranks of a process may read a generation of many files, so no
    /// file stays open.
    fn source(&self, file: usize) -> Result<Box<dyn FileSource>, Error> {
        let FileEntry { name, bytes: want, .. } = &self.manifest.files[file];
        let path = self.path.join(name);
        let source = self.files.open(&path).map_err(Error::io("open", &path))?;
        let got = source.size().map_err(Error::io("get the size of", &path))?;
        let want = *want;
        if got == want { Ok(source) } else { Err(Error::Truncated { path, got, want }) }
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the hash of the file of its manifest. The manifest has the hashes of all other
    /// bytes, so generations of one hash have the same content.
    #[must_use]
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// Fills `values` with f32 elements of a tensor, beginning at element `offset` in row-major
    /// order. Reads the chunks that overlap them, and compares their hashes (R3).
    ///
    /// # Errors
    /// [`Error::Tensor`] if there is no such tensor, its elements are not f32, or it ends before
    /// `values` is full; [`Error::Corrupt`] if a hash differs; [`Error::Removed`] if a writer has
    /// removed the generation; [`Error::Io`]. After an error, the content of `values` is
    /// unspecified.
    pub fn read(&self, tensor: &str, offset: u64, values: &mut [f32]) -> Result<(), Error> {
        self.read_part(tensor, offset, values).map_err(|error| self.looked_at_again(error))
    }

    fn read_part(&self, tensor: &str, offset: u64, values: &mut [f32]) -> Result<(), Error> {
        let entry = self.tensor(tensor)?;
        if entry.dtype != Dtype::F32 {
            return Err(Error::tensor(
                tensor,
                format!("its elements are {}, not F32", entry.dtype),
            ));
        }
        let wanted = offset..offset.saturating_add(values.len() as u64);
        if entry.numel().is_none_or(|numel| wanted.end > numel) {
            let problem = format!("elements {wanted:?} exceed its shape {:?}", entry.shape);
            return Err(Error::tensor(tensor, problem));
        }
        let mut scratch = Vec::new();
        for chunk in overlapping(entry, &wanted) {
            let of_chunk = chunk.offset..chunk.offset + chunk.len;
            let common = of_chunk.start.max(wanted.start)..of_chunk.end.min(wanted.end);
            let target = &mut values[within(&common, wanted.start)];
            let target: &mut [u8] = bytemuck::cast_slice_mut(target);
            if common == of_chunk {
                self.read_chunk(tensor, chunk, target)?;
            } else {
                scratch.resize(within(&(chunk.begin..chunk.end), chunk.begin).len(), 0);
                self.read_chunk(tensor, chunk, &mut scratch)?;
                let within = within(&common, chunk.offset);
                target.copy_from_slice(&scratch[4 * within.start..4 * within.end]);
            }
        }
        Ok(())
    }

    /// Calls `act` with the bytes of each chunk of a tensor, in order of offset, for any dtype.
    /// Each hash is compared before the call.
    ///
    /// # Errors
    /// [`Error::Tensor`] if there is no such tensor; [`Error::Corrupt`] if a hash differs;
    /// [`Error::Removed`] if a writer has removed the generation; [`Error::Io`]; the error of
    /// `act`.
    pub fn for_each_chunk<E: From<Error>>(
        &self,
        tensor: &str,
        mut act: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut bytes = Vec::new();
        for chunk in &self.tensor(tensor)?.chunks {
            bytes.resize(within(&(chunk.begin..chunk.end), chunk.begin).len(), 0);
            let read = self.read_chunk(tensor, chunk, &mut bytes);
            read.map_err(|error| self.looked_at_again(error))?;
            act(&bytes)?;
        }
        Ok(())
    }

    /// Reads all files and compares all hashes. Returns at most one error for each tensor; if no
    /// tensor has one, an error for each file whose hash differs or which cannot be read. Empty if
    /// the generation is intact. [`Error::Removed`] alone if a writer has removed the generation
    /// meanwhile.
    #[must_use]
    pub fn verify(&self) -> Vec<Error> {
        let wrong = self.damages();
        if wrong.iter().any(Error::is_damage) && !self.is_in_place() {
            return vec![Error::Removed { path: self.path.clone() }];
        }
        wrong
    }

    fn damages(&self) -> Vec<Error> {
        let of_chunk = |name: &str, chunk: &Chunk| {
            let mut bytes = vec![0; within(&(chunk.begin..chunk.end), chunk.begin).len()];
            self.read_chunk(name, chunk, &mut bytes).err()
        };
        let of_tensor = |(name, entry): (&String, &TensorEntry)| {
            entry.chunks.iter().find_map(|chunk| of_chunk(name, chunk))
        };
        let mut wrong: Vec<Error> = self.manifest.tensors.iter().filter_map(of_tensor).collect();
        if wrong.is_empty() {
            // The hashes of files cover headers, and bytes between chunks.
            wrong.extend(
                (0..self.manifest.files.len()).filter_map(|file| self.verify_file(file).err()),
            );
        }
        wrong
    }

    fn verify_file(&self, index: usize) -> Result<(), Error> {
        let file = &self.manifest.files[index];
        let source = self.source(index)?;
        let path = self.path.join(&file.name);
        let mut hasher = blake3::Hasher::new();
        let mut block = vec![0; BLOCK];
        let mut at = 0;
        while at < file.bytes {
            let len = usize::try_from(file.bytes - at).unwrap_or(BLOCK).min(BLOCK);
            source.read_at(at, &mut block[..len]).map_err(Error::io("read", &path))?;
            hasher.update(&block[..len]);
            at += len as u64;
        }
        match Hash::finish(&hasher) {
            found if found == file.hash => Ok(()),
            found => {
                let problem = format!("its hash is {found}, the manifest says {}", file.hash);
                Err(Error::manifest(&path, problem))
            }
        }
    }

    fn tensor(&self, name: &str) -> Result<&TensorEntry, Error> {
        let entry = self.manifest.tensors.get(name);
        entry.ok_or_else(|| Error::tensor(name, "the checkpoint has no tensor of that name"))
    }

    /// Reads a whole chunk into `bytes`, which has the chunk's length.
    fn read_chunk(&self, tensor: &str, chunk: &Chunk, bytes: &mut [u8]) -> Result<(), Error> {
        let index = usize::try_from(chunk.file).expect("a manifest's chunks are in its files");
        let path = || self.path.join(&self.manifest.files[index].name);
        let read = self.source(index)?.read_at(chunk.begin, bytes);
        read.map_err(|source| Error::io("read", &path())(source))?;
        if Hash::of(bytes) == chunk.hash {
            return Ok(());
        }
        let offset = chunk.offset;
        let end = chunk.offset + chunk.len;
        Err(Error::Corrupt { path: path(), tensor: tensor.into(), offset, end })
    }
}

/// Returns whether the directory above lists a path.
fn is_listed(files: &dyn ReadFiles, path: &Path) -> bool {
    match files.list(directory_of(path)) {
        Ok(entries) => entries.iter().any(|entry| entry.file_name() == path.file_name()),
        Err(_) => true,
    }
}

/// The chunks that have some of these elements.
fn overlapping<'a>(
    entry: &'a TensorEntry,
    wanted: &Range<u64>,
) -> impl Iterator<Item = &'a Chunk> + use<'a> {
    let Range { start, end } = *wanted;
    let first = entry.chunks.partition_point(move |chunk| chunk.offset + chunk.len <= start);
    entry.chunks[first..].iter().take_while(move |chunk| chunk.offset < end)
}

/// A range relative to `start`.
fn within(range: &Range<u64>, start: u64) -> Range<usize> {
    let index = |at: u64| usize::try_from(at - start).expect("it is in memory");
    index(range.start)..index(range.end)
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation")
            .field("path", &self.path)
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}
