//! A generation that is being written.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;

use crate::error::Error;
use crate::files::{Files, read_whole, write_synced};
use crate::lease::Lease;
use crate::manifest::{Head, MOST_BYTES, Manifest};
use crate::name::{MANIFEST, RESERVED, nonce, writing};
use crate::part::{PartOfTensor, Slice, Writer, WriterPart};
use crate::store::Store;
use crate::tensors::{Chunk, FileEntry, TensorEntry};

/// The directory in which writers write their parts of a generation.
#[derive(Clone, Debug)]
pub struct DraftPlace {
    files: Arc<dyn Files>,
    path: PathBuf,
    step: u64,
    nonce: u64,
}

/// A generation that is being written. It borrows the lease.
#[derive(Debug)]
#[must_use = "a draft is committed or discarded"]
pub struct Draft<'a> {
    lease: &'a Lease,
    place: DraftPlace,
}

/// A generation that exists now.
#[derive(Debug)]
pub struct Committed {
    /// Its directory.
    pub path: PathBuf,
    /// Failures after the commit, which harm no generation: replacing the link `latest`, reading
    /// old generations or removing them.
    pub left_undone: Vec<Error>,
}

type TensorEntries = BTreeMap<String, TensorEntry>;

impl Store {
    /// Returns the directory in which writers write a generation of `step`. Its name contains
    /// `nonce`. Does not access the file system.
    #[must_use]
    pub fn place(&self, step: u64, nonce: u64) -> DraftPlace {
        let path = self.root().join(writing(step, nonce));
        DraftPlace { files: Arc::clone(self.files()), path, step, nonce }
    }
}

impl Lease {
    /// Begins a generation: makes the directory that the commit will rename. Removes broken
    /// generations of this step and of later steps, since the caller has gone on from an older one.
    ///
    /// # Errors
    /// [`Error::Exists`] if a generation of this step or of a later one is intact. If such a
    /// generation cannot be read and its bytes are not certainly lost, the error of reading it.
    /// [`Error::Io`].
    pub fn begin(&mut self, step: u64) -> Result<Draft<'_>, Error> {
        self.begin_at(self.store().place(step, nonce()))
    }

    /// Begins a generation as [`begin`](Self::begin) does, at a given place of this store. Writers
    /// may know the place before the call, and may have [made](DraftPlace::make) it.
    ///
    /// # Errors
    /// The errors of [`begin`](Self::begin).
    pub fn begin_at(&mut self, place: DraftPlace) -> Result<Draft<'_>, Error> {
        self.make_room(place.step, &place.path)?;
        place.make()?;
        Ok(Draft { lease: self, place })
    }
}

impl DraftPlace {
    /// Returns the number that makes its name unique. With the step, it tells other ranks which
    /// place is meant.
    #[must_use]
    pub fn nonce(&self) -> u64 {
        self.nonce
    }

    /// Makes its directory, if no other writer has made it yet.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn make(&self) -> Result<(), Error> {
        match self.files.create_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map_err(Error::io("make", &self.path)),
        }
    }

    /// Removes the directory and all files that writers have written to it, as far as possible. The
    /// next lease removes the rest. For use without a draft, when
    /// [`Lease::begin_at`](crate::Lease::begin_at) has failed.
    pub fn discard(self) {
        match self.files.remove(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path = self.path.display();
                hsdp_warnings::warn!(%path, %error, "the files of a failed save could not be removed \
                                               yet");
            }
            _ => {}
        }
    }

    /// Writes one writer's file and its note. Both are synced when this returns (W3, W4).
    ///
    /// # Errors
    /// [`Error::Tensor`] if two slices are of one tensor, a slice has no elements, or a tensor is
    /// named `__metadata__`; [`Error::Io`].
    pub fn write(&self, writer: Writer, slices: &[Slice<'_>]) -> Result<(), Error> {
        if let Some(empty) = slices.iter().find(|slice| slice.values.is_empty()) {
            return Err(Error::tensor(empty.tensor, "a slice of it has no elements"));
        }
        if slices.iter().any(|slice| slice.tensor == RESERVED) {
            return Err(Error::tensor(RESERVED, "safetensors reserves this name"));
        }
        WriterPart::write(&*self.files, &self.path, writer, slices)
    }

    /// Reads the notes of all writers (W6).
    fn parts(&self, writers: usize) -> Result<Vec<WriterPart>, Error> {
        let part = |index| {
            let writer = Writer { index, of: writers };
            let path = self.path.join(writer.note());
            let bytes = read_whole(&*self.files, &path, MOST_BYTES);
            WriterPart::decode(&path, writer, &bytes.map_err(Error::io("read", &path))?)
        };
        (0..writers).map(part).collect()
    }
}

impl<'a> Draft<'a> {
    /// The directory in which writers write.
    #[must_use]
    pub fn place(&self) -> &DraftPlace {
        &self.place
    }

    /// Makes the draft a generation. Call it after all `writers` have written. On an error the
    /// draft is discarded.
    ///
    /// # Errors
    /// [`Error::Manifest`] if the parts do not cover every tensor exactly once; [`Error::Tensor`]
    /// if writers have different shapes of a tensor; [`Error::Truncated`] if a file has another
    /// size than its writer's note says; [`Error::Io`].
    pub fn commit(self, head: Head, writers: usize) -> Result<Committed, Error> {
        match self.publish(head, writers) {
            Ok(path) => {
                let unlinked =
                    self.lease.store().link_latest(self.place.step, self.place.nonce).err();
                let old = self.lease.remove_old(self.place.step);
                let left_undone = unlinked.into_iter().chain(old).collect();
                Ok(Committed { path, left_undone })
            }
            Err(error) => {
                self.discard();
                Err(error)
            }
        }
    }

    /// Removes its directory, as far as possible. The next lease removes the rest.
    pub fn discard(self) {
        self.place.discard();
    }

    fn files(&self) -> &dyn Files {
        &*self.place.files
    }

    /// W6 to W8.
    fn publish(&self, head: Head, writers: usize) -> Result<PathBuf, Error> {
        let files = self.files();
        let place = &self.place.path;
        let parts = self.place.parts(writers)?;
        self.check_sizes(&parts)?;
        let path = place.join(MANIFEST);
        let (entries, tensors) = merged(parts)?;
        let manifest = Manifest::new(head, entries, tensors).encode(&path)?;
        write_synced(files, &path, |write| write(&manifest))?;
        for index in 0..writers {
            let note = place.join(Writer { index, of: writers }.note());
            files.remove(&note).map_err(Error::io("remove", &note))?;
        }
        files.sync_dir(place).map_err(Error::io("sync", place))?;
        let root = self.lease.store().root();
        let published = self.lease.store().generation_path(self.place.step);
        files.rename(place, &published).map_err(Error::io("rename", place))?;
        if let Err(error) = files.sync_dir(root) {
            // The save fails, so the generation must not stay: a second save of the same step would
            // be refused.
            self.withdraw(&published);
            return Err(Error::io("sync", root)(error));
        }
        Ok(published)
    }

    /// Gives a generation its unfinished name back, as far as possible.
    fn withdraw(&self, published: &Path) {
        if let Err(error) = self.files().rename(published, &self.place.path) {
            let path = published.display();
            hsdp_warnings::warn!(%path, %error, "the checkpoint of a failed save could not be withdrawn: \
                                           it exists");
        }
    }

    fn check_sizes(&self, parts: &[WriterPart]) -> Result<(), Error> {
        for WriterPart { file, .. } in parts {
            let path = self.place.path.join(&file.name);
            let source = self.files().open(&path).map_err(Error::io("open", &path))?;
            let got = source.size().map_err(Error::io("get the size of", &path))?;
            if got != file.bytes {
                return Err(Error::Truncated { path, got, want: file.bytes });
            }
        }
        Ok(())
    }
}

/// The files of all parts, and their tensors with the chunks in order.
fn merged(parts: Vec<WriterPart>) -> Result<(Vec<FileEntry>, TensorEntries), Error> {
    let mut files = Vec::new();
    let mut tensors = TensorEntries::new();
    for (number, WriterPart { file, tensors: parts }) in (0..).zip(parts) {
        files.push(file);
        parts.into_iter().try_for_each(|part| add(&mut tensors, part, number))?;
    }
    for tensor in tensors.values_mut() {
        tensor.chunks.sort_by_key(|chunk| chunk.offset);
    }
    Ok((files, tensors))
}

fn add(tensors: &mut TensorEntries, part: PartOfTensor, file: u64) -> Result<(), Error> {
    let PartOfTensor { tensor, shape, chunks } = part;
    let new = || TensorEntry { shape: shape.clone(), dtype: Dtype::F32, chunks: Vec::new() };
    let entry = tensors.entry(tensor.clone()).or_insert_with(new);
    if entry.shape != shape {
        let problem = format!("one writer has shape {:?}, another {shape:?}", entry.shape);
        return Err(Error::tensor(&tensor, problem));
    }
    entry.chunks.extend(chunks.into_iter().map(|chunk| Chunk { file, ..chunk }));
    Ok(())
}
