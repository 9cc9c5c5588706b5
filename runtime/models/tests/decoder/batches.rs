//! Batches of the golden runs.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor, safetensors};
use hsdp::{Mesh, Rank};

/// Returns a folder of `tests/golden_llama`.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden_llama").join(name)
}

/// Returns the folders of `tests/golden_decoders`, one for each family.
pub(crate) fn families() -> Vec<PathBuf> {
    folders("tests/golden_decoders")
}

/// Returns the folders of families with other settings.
pub(crate) fn odd_families() -> Vec<PathBuf> {
    folders("tests/golden_decoders/odd")
}

/// Returns the folders in a folder that have a model.
fn folders(path: &str) -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let entries = std::fs::read_dir(all).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut folders: Vec<_> = paths.filter(|path| path.join("model").is_dir()).collect();
    folders.sort();
    folders
}

/// Tokens and labels, `[steps, sequences, length]`, and those that are held out, `[sequences,
/// length]`.
pub(crate) struct Batches {
    pub(crate) training: [Tensor; 2],
    pub(crate) held_out: [Tensor; 2],
}

impl Batches {
    pub(crate) fn read(folder: &Path) -> Self {
        let tensors = safetensors::load(folder.join("batches.safetensors"), &Device::Cpu);
        let tensors = tensors.expect("a file of batches");
        let pair = |prefix: &str| {
            ["input_ids", "labels"].map(|name| tensors[&format!("{prefix}{name}")].clone())
        };
        Self { training: pair(""), held_out: pair("eval_") }
    }

    /// Returns the sequences of a microbatch. Each rank has a block, and in it each microbatch.
    pub(crate) fn of_microbatch(
        &self,
        step: usize,
        rank: Rank,
        microbatch: usize,
        mesh: Mesh,
        microbatches: usize,
    ) -> [Tensor; 2] {
        let row = self.training.each_ref().map(|all| all.get(step).expect("a step"));
        let blocks = mesh.world_size() * microbatches;
        row.map(|row| block(&row, rank.index() * microbatches + microbatch, blocks))
    }

    /// The held-out sequences of a rank.
    pub(crate) fn held_out(&self, rank: Rank, mesh: Mesh) -> [Tensor; 2] {
        self.held_out.each_ref().map(|all| block(all, rank.index(), mesh.world_size()))
    }
}

/// A block of consecutive sequences.
fn block(sequences: &Tensor, index: usize, blocks: usize) -> Tensor {
    let count = sequences.dims()[0];
    assert!(count.is_multiple_of(blocks), "{count} sequences in {blocks} blocks");
    sequences.narrow(0, index * (count / blocks), count / blocks).expect("within")
}
