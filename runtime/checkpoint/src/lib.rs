//! Checkpoints of sharded models: the format and its files, independent of training.
//! `CHECKPOINT.md`, beside this crate's sources, defines the files, the order in which they are
//! written, and the guarantees that a reader has.
//!
//! A checkpoint is a directory that exists completely or not at all. It holds safetensors files,
//! and a manifest with the hashes of all of them. Any number of writers write it. Any number of
//! readers read any ranges of its tensors.
//!
//! | concept | PyTorch's DCP | here |
//! |---|---|---|
//! | a directory of checkpoints | (a path for each) | [`Store`] |
//! | the data that a rank writes | `SavePlan` | [`Slice`] |
//! | the list of contents | `.metadata`, pickled | [`Manifest`], JSON |
//! | reading | `LoadPlan` | [`Generation::read`] |
//! | Hugging Face models | `HuggingFaceStorageReader`, `...Writer` | [`Folder`], [`export`] |
//!
//! ```
//! use std::sync::Arc;
//! use hsdp_checkpoint::{Disk, Head, Slice, Store, Writer};
//!
//! let folder = tempfile::tempdir().expect("a folder");
//! let store = Store::new(folder.path(), Arc::new(Disk));
//! let mut lease = store.lease("this example").expect("no other job writes here");
//!
//! // Each of two writers has a half of a tensor of three rows.
//! let draft = lease.begin(120).expect("no such step yet");
//! for (index, values) in [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]].into_iter().enumerate() {
//!     let half = Slice { tensor: "w", shape: &[3, 2], offset: 3 * index as u64, values: values[..].into() };
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
//! All modules are private, and the crate root re-exports their items. A module imports only
//! modules before it. In reading order: `hash`, `error`; `files`, `disk` (the operations of a file
//! system); `name`; `bounds` (of untrusted JSON); `tensors` (with their chunks, and the check that
//! they are complete), `manifest` (the contents of a generation); `generation` (reading), `store`,
//! `lease`; `header` (headers of safetensors files), `part` (the data of one writer), `draft` (a
//! generation that is being written); `huggingface` (folders of Hugging Face models).

mod bounds;
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
mod tensors;

pub use self::bounds::MOST_USER_BYTES;
pub use self::disk::{Disk, LinkedDisk};
pub use self::draft::{Committed, Draft, DraftPlace};
pub use self::error::{Error, listed};
pub use self::files::{FileSource, Files, ReadFiles, Sink};
pub use self::generation::Generation;
pub use self::hash::Hash;
pub use self::huggingface::{Exported, Folder, Weights, export};
pub use self::lease::Lease;
pub use self::manifest::{Head, LossScaleHead, Manifest, MeshShape, OptimizerHead, TrainingHead};
pub use self::name::{RESERVED, STATE, nonce, state_tensor};
pub use self::part::{Elements, Slice, Writer};
pub use self::store::{Fallback, Store};
pub use self::tensors::{Chunk, FileEntry, TensorEntry};
