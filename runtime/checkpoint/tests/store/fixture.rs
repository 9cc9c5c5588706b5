//! A store of small generations, and changes of them.

use std::fs::{self, OpenOptions};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{
    Disk, Elements, Error, Generation, Hash, Head, Lease, Slice, Store, Writer, state_tensor,
};
use tempfile::TempDir;

/// A store in a temporary folder of its own.
pub(crate) struct Fixture {
    pub(crate) folder: TempDir,
}

/// The elements of the tensor `w` in a step. Each encodes the step and its place.
pub(crate) fn elements(step: u64, len: usize) -> Vec<f32> {
    (0..len).map(|place| (step * 1000) as f32 + place as f32).collect()
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder") }
    }

    pub(crate) fn store(&self) -> Store {
        Store::new(self.folder.path(), Arc::new(Disk))
    }

    pub(crate) fn path(&self, step: u64) -> PathBuf {
        self.folder.path().join(format!("step-{step:08}"))
    }

    pub(crate) fn manifest(&self, step: u64) -> PathBuf {
        self.path(step).join("manifest.json")
    }

    /// Takes the lease, and saves these steps. The store keeps as many generations.
    pub(crate) fn saved(steps: &[u64]) -> Self {
        let fixture = Self::new();
        let mut lease = fixture.store().keeping(steps.len()).lease("test").expect("free");
        steps.iter().for_each(|step| save(&mut lease, *step).expect("saved"));
        fixture
    }

    /// Changes the manifest of a step, and puts the hash of the new text in front of it.
    pub(crate) fn rewrite(&self, step: u64, change: impl Fn(&str) -> String) {
        let path = self.manifest(step);
        let text = fs::read_to_string(&path).expect("there");
        let (_, value) = text.split_once("\"checkpoint\":").expect("an outer object");
        let value = change(value.strip_suffix('}').expect("its end"));
        let hash = Hash::of(value.as_bytes());
        let sealed = format!("{{\"hash\":\"{hash}\",\"checkpoint\":{value}}}");
        fs::write(&path, sealed).expect("written");
    }

    pub(crate) fn file(&self, step: u64) -> PathBuf {
        self.path(step).join("r00000-of-00002.safetensors")
    }
}

/// Saves a step. Two writers each have about half of `w`, of shape 10 x 3, and the second one has
/// all of a state.
pub(crate) fn save(lease: &mut Lease, step: u64) -> Result<(), Error> {
    let values = elements(step, 30);
    let draft = lease.begin(step)?;
    let half = |offset: usize, values| Slice {
        tensor: "w",
        shape: &[10, 3],
        offset: offset as u64,
        values: Elements::F32(values),
    };
    let of = 2;
    draft.place().write(Writer { index: 0, of }, &[half(0, &values[..14])])?;
    let state = state_tensor("exp_avg", "w");
    let state = Slice { tensor: &state, shape: &[10, 3], offset: 0, values: values[..].into() };
    draft.place().write(Writer { index: 1, of }, &[state, half(14, &values[14..])])?;
    let committed = draft.commit(Head::of_step(step), of)?;
    assert!(committed.left_undone.is_empty(), "{:?}", committed.left_undone);
    Ok(())
}

pub(crate) fn read(generation: &Generation, tensor: &str) -> Vec<f32> {
    let mut values = vec![0.0; 30];
    generation.read(tensor, 0, &mut values).expect("readable");
    values
}

pub(crate) fn flip_bit(path: &Path, at: u64) {
    let mut file = OpenOptions::new().read(true).write(true).open(path).expect("there");
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).expect("there");
    file.read_exact(&mut byte).expect("a byte");
    byte[0] ^= 4;
    file.seek(SeekFrom::Start(at)).expect("there");
    file.write_all(&byte).expect("written");
}

/// The writer of a generation that has one.
pub(crate) const ONLY: Writer = Writer { index: 0, of: 1 };

/// A whole tensor.
pub(crate) fn whole() -> Slice<'static> {
    Slice { tensor: "w", shape: &[2], offset: 0, values: Elements::F32(&[1.0, 2.0]) }
}
