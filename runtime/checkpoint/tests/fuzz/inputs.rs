//! What is done with an input that may be anything: the fuzzers have these grow, and `main.rs` runs what they have found.
//!
//! Whatever the bytes are, an error is the worst that may happen; and what is taken is what another reader takes.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{Files, Folder, Generation, Hash, Manifest, Sink, Source};
use safetensors::SafeTensors;

/// Elements of a tensor that are read of an input.
const READ: u64 = 1000;

/// A manifest without its hash: that is put in front of it, or nothing else would ever be tried.
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
            // Zeros have no hash that anybody would come upon: but for no elements, it is an error.
            let mut values = vec![0.0; usize::try_from(len).expect("few")];
            let read = generation.read(name, offset, &mut values);
            assert!(read.is_err() || values.iter().all(|value| value.to_bits() == 0));
        }
    }
}

/// A file of safetensors: a header, and what comes behind it.
pub(crate) fn header(input: &[u8]) {
    let file = Folder::open(Arc::new(Whole(input.to_vec())), Path::new("folder"));
    let reference = SafeTensors::deserialize(input);
    let folder = match (file, reference) {
        (Ok(folder), Ok(reference)) => {
            assert_eq!(folder.tensors().count(), reference.len());
            folder
        }
        (Err(_), Err(_)) => return,
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

/// Where a tensor of so many elements is read: at its ends, and behind them.
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

/// A folder with one file.
#[derive(Debug)]
struct Whole(Vec<u8>);

/// Zeros.
struct Zeros(u64);

impl Source for Zeros {
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

impl Source for Bytes {
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

/// Files that are read, and nothing else.
macro_rules! read_only {
    ($name:ident) => {
        impl Files for $name {
            fn create_dir(&self, _: &Path) -> io::Result<()> {
                Err(io::ErrorKind::Unsupported.into())
            }

            fn create(&self, _: &Path) -> io::Result<Box<dyn Sink>> {
                Err(io::ErrorKind::Unsupported.into())
            }

            fn sync_dir(&self, _: &Path) -> io::Result<()> {
                Err(io::ErrorKind::Unsupported.into())
            }

            fn rename(&self, _: &Path, _: &Path) -> io::Result<()> {
                Err(io::ErrorKind::Unsupported.into())
            }

            fn link(&self, _: &Path, _: &Path) -> io::Result<()> {
                Err(io::ErrorKind::Unsupported.into())
            }

            fn remove(&self, _: &Path) -> io::Result<()> {
                Err(io::ErrorKind::Unsupported.into())
            }

            fn list(&self, _: &Path) -> io::Result<Vec<PathBuf>> {
                Ok(Vec::new())
            }

            fn open(&self, path: &Path) -> io::Result<Box<dyn Source>> {
                let name = path.file_name().and_then(|name| name.to_str());
                self.source(name.unwrap_or_default()).ok_or_else(|| io::ErrorKind::NotFound.into())
            }
        }
    };
}

read_only!(Hollow);
read_only!(Whole);

impl Hollow {
    fn source(&self, name: &str) -> Option<Box<dyn Source>> {
        if name == "manifest.json" {
            return Some(Box::new(Bytes(self.manifest.clone())));
        }
        let (_, size) = self.sizes.iter().find(|(file, _)| file == name)?;
        Some(Box::new(Zeros(*size)))
    }
}

impl Whole {
    fn source(&self, name: &str) -> Option<Box<dyn Source>> {
        (name == "model.safetensors").then(|| Box::new(Bytes(self.0.clone())) as Box<dyn Source>)
    }
}
