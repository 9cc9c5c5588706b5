//! The functions that run one untrusted input. The fuzzers generate inputs for them, and `main.rs`
//! runs the inputs found so far.
//!
//! For all bytes, an error is the worst that may happen. This crate accepts an input only if
//! another reader accepts it, and refuses no tensors that the other one accepts in the usual form.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{Error, FileSource, Folder, Generation, Hash, Manifest, ReadFiles};
use safetensors::SafeTensors;

/// The most elements of a tensor that a test reads.
const READ: u64 = 1000;

/// Runs a manifest without its hash. The correct hash is put in front of it, since a wrong hash
/// would end every try.
pub(crate) fn manifest(input: &[u8]) {
    let path = Path::new("manifest.json");
    let hash = serde_json::to_string(&Hash::of(input)).expect("a string");
    let sealed = [b"{\"hash\":", hash.as_bytes(), b",\"checkpoint\":", input, b"}"].concat();
    let Ok(manifest) = Manifest::decode(path, &sealed) else { return };
    let encoded = manifest.encode(path).expect("what was read can be written");
    assert_eq!(Manifest::decode(path, &encoded).expect("and read again"), manifest);
    let files = Arc::new(Hollow { manifest: encoded, sizes: sizes(&manifest) });
    let Ok(generation) = Generation::open(files, Path::new("generation")) else { return };
    for (name, tensor) in &generation.manifest().tensors {
        let numel: u64 = tensor.shape.iter().product();
        for (offset, len) in ends(numel) {
            // No input has the hash of zeros by chance: except for zero elements, the read fails.
            let mut values = vec![0.0; usize::try_from(len).expect("few")];
            let read = generation.read(name, offset, &mut values);
            assert!(read.is_err() || values.iter().all(|value| value.to_bits() == 0));
        }
    }
}

/// Runs a safetensors file: a header, and the data after it.
pub(crate) fn header(input: &[u8]) {
    let file = Folder::open(Arc::new(Whole(input.to_vec())), Path::new("folder"));
    let reference = SafeTensors::deserialize(input);
    let folder = match (file, reference) {
        (Ok(folder), Ok(reference)) => {
            assert_eq!(folder.tensors().count(), reference.len());
            folder
        }
        (Err(_), Err(_)) => return,
        (Err(refused), Ok(reference)) => return assert_stricter(&refused, &reference),
        (ours, theirs) => panic!("one takes what the other does not: {ours:?}, {theirs:?}"),
    };
    let theirs = SafeTensors::deserialize(input).expect("as before");
    for (name, shape) in folder.tensors() {
        let tensor = theirs.tensor(name).expect("it is there");
        assert!(tensor.shape().iter().map(|size| *size as u64).eq(shape.iter().copied()));
        for (offset, len) in ends(shape.iter().product()) {
            let mut values = vec![0.0; usize::try_from(len).expect("few")];
            if folder.read(name, offset, &mut values).is_ok()
                && tensor.dtype() == safetensors::Dtype::F32
            {
                let from = 4 * usize::try_from(offset).expect("it fits");
                let found: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(found, tensor.data()[from..from + found.len()]);
            }
        }
    }
}

/// This crate refuses more than the other reader only for the form of a header, or for a tensor of
/// many dims: the same tensors in a header of the usual form are accepted.
fn assert_stricter(refused: &Error, reference: &SafeTensors<'_>) {
    let tensors = reference.tensors();
    if tensors.iter().all(|(_, tensor)| tensor.shape().len() <= 64) {
        let plain = safetensors::serialize(tensors, None).expect("it was read");
        let file = Folder::open(Arc::new(Whole(plain)), Path::new("folder"));
        assert!(file.is_ok(), "{refused}: {file:?}");
    }
}

/// The ranges at which a tensor of `numel` elements is read: at both ends, and after the last
/// element.
fn ends(numel: u64) -> [(u64, u64); 3] {
    let len = numel.min(READ);
    [(0, len), (numel - len, len), (numel, 1)]
}

fn sizes(manifest: &Manifest) -> Vec<(String, u64)> {
    manifest.files.iter().map(|file| (file.name.clone(), file.bytes)).collect()
}

/// A generation whose files are as long as its manifest says, and hold zeros.
#[derive(Debug)]
struct Hollow {
    manifest: Vec<u8>,
    sizes: Vec<(String, u64)>,
}

/// A folder with a single file.
#[derive(Debug)]
struct Whole(Vec<u8>);

/// A file of zeros, of this size.
struct Zeros(u64);

impl FileSource for Zeros {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match offset.checked_add(bytes.len() as u64) {
            Some(end) if end <= self.0 => {
                bytes.fill(0);
                Ok(())
            }
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

struct Bytes(Vec<u8>);

impl FileSource for Bytes {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..));
        let from = from.and_then(|from| from.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Implements [`ReadFiles`] by `source`, which finds a file by its name.
macro_rules! read_files {
    ($name:ident) => {
        impl ReadFiles for $name {
            fn list(&self, _: &Path) -> io::Result<Vec<PathBuf>> {
                Ok(Vec::new())
            }

            fn open(&self, path: &Path) -> io::Result<Box<dyn FileSource>> {
                let name = path.file_name().and_then(|name| name.to_str());
                self.source(name.unwrap_or_default()).ok_or_else(|| io::ErrorKind::NotFound.into())
            }
        }
    };
}

read_files!(Hollow);
read_files!(Whole);

impl Hollow {
    fn source(&self, name: &str) -> Option<Box<dyn FileSource>> {
        if name == "manifest.json" {
            return Some(Box::new(Bytes(self.manifest.clone())));
        }
        let (_, size) = self.sizes.iter().find(|(file, _)| file == name)?;
        Some(Box::new(Zeros(*size)))
    }
}

impl Whole {
    fn source(&self, name: &str) -> Option<Box<dyn FileSource>> {
        (name == "model.safetensors")
            .then(|| Box::new(Bytes(self.0.clone())) as Box<dyn FileSource>)
    }
}
