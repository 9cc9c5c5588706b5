//! Checkpoints of sharded models: a format, its files, and nothing of training. `CHECKPOINT.md`, beside this crate's sources, says what is
//! written in which order, and what a reader relies on.
//!
//! A checkpoint is a directory that is there as a whole or not at all, of safetensors files and a manifest with hashes of all of them. It
//! is written by any number of writers, and read by any number of readers who need any ranges of its tensors.
//!
//! | concept | PyTorch's DCP | here |
//! |---|---|---|
//! | a directory of checkpoints | (a path for each) | [`Store`] |
//! | what a rank writes | `SavePlan` | [`Slice`] |
//! | what there is | `.metadata`, pickled | [`Manifest`], JSON |
//! | reading | `LoadPlan` | [`Generation::read`] |
//! | models of others | `HuggingFaceStorageReader`, `...Writer` | [`Folder`], [`export`] |
//!
//! ```
//! use std::sync::Arc;
//! use hsdp_checkpoint::{Disk, Head, Slice, Store, Writer};
//!
//! let folder = tempfile::tempdir().expect("a folder");
//! let store = Store::new(folder.path(), Arc::new(Disk));
//! let mut lease = store.lease("this example").expect("nobody else writes here");
//!
//! // Each of two writers has a half of a tensor of three rows.
//! let draft = lease.begin(120).expect("no such step yet");
//! for (index, values) in [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]].into_iter().enumerate() {
//!     let half = Slice { tensor: "w", shape: &[3, 2], offset: 3 * index as u64, values: &values };
//!     draft.place().write(Writer { index, of: 2 }, &[half]).expect("written");
//! }
//! draft.commit(Head::of_step(120), 2).expect("two halves are the whole");
//!
//! let latest = store.latest().expect("readable").expect("there is one");
//! assert_eq!(latest.manifest().step, 120);
//! let mut middle = [0.0; 2];
//! latest.read("w", 2, &mut middle).expect("its hashes are right");
//! assert_eq!(middle, [3.0, 4.0]);
//! ```
//!
//! # Modules
//!
//! All are private and their items are named here. In reading order: `error`; `files`, `disk` (what is asked of a file system); `name`,
//! `hash`; `manifest`, `tiles` (what there is, and that it is whole); `part` (what one writer writes), `lease`, `draft` (a generation in the
//! making); `generation` (reading), `store`; `header` (of safetensors files), `huggingface` (folders that others write and read).

mod disk;
mod draft;
mod error;
mod files;
mod generation;
mod hash;
mod header;
mod huggingface;
mod lease;
mod manifest;
mod name;
mod part;
mod store;
mod tiles;

pub use self::disk::{Disk, LinkedDisk};
pub use self::draft::{Committed, Draft, Place};
pub use self::error::Error;
pub use self::files::{Files, Sink, Source};
pub use self::generation::Generation;
pub use self::hash::Hash;
pub use self::huggingface::{Exported, Folder, export};
pub use self::lease::{Lease, nonce};
pub use self::manifest::{
    Chunk, FileEntry, Head, LossScaleHead, Manifest, MeshShape, OptimizerHead, TensorEntry,
    Training,
};
pub use self::name::{RESERVED, STATE, state_tensor};
pub use self::part::{Slice, Writer};
pub use self::store::{Fallback, Store};
