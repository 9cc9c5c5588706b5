//! A vector that all threads read as a whole. Each thread writes a part of it.

use std::ops::Range;

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};
use hsdp::sharding::balanced;
use parking_lot::{RwLock, RwLockWriteGuard};

/// The vector: one part for each rank, behind a lock of its own.
pub(super) struct Parts(Vec<Part>);

struct Part {
    range: Range<usize>,
    values: RwLock<Vec<f32>>,
}

impl Parts {
    /// Cuts `values` into as many parts as there are ranks.
    pub(super) fn cut(values: &[f32], ranks: usize) -> Self {
        let part = |rank| {
            let range = balanced(values.len(), ranks, rank);
            Part { values: RwLock::new(values[range.clone()].to_vec()), range }
        };
        Self((0..ranks).map(part).collect())
    }

    /// Returns the range of the part of a rank.
    pub(super) fn range(&self, rank: usize) -> Range<usize> {
        self.0[rank].range.clone()
    }

    /// Returns the part of a rank, locked for writing.
    pub(super) fn of(&self, rank: usize) -> RwLockWriteGuard<'_, Vec<f32>> {
        self.0[rank].values.write()
    }

    /// Overwrites the values of `tensor` with the elements from `start` on.
    pub(super) fn copy_to(&self, tensor: &Tensor, start: usize) -> Result<()> {
        tensor.inplace_op1(&CopyFrom { parts: self, start })
    }
}

struct CopyFrom<'a> {
    parts: &'a Parts,
    start: usize,
}

impl InplaceOp1 for CopyFrom<'_> {
    fn name(&self) -> &'static str {
        "copy from parts"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(target), Some((0, len))) = (storage, layout.contiguous_offsets())
        else {
            bail!("a parameter must be a whole f32 tensor")
        };
        for Part { range, values } in &self.parts.0 {
            let from = range.start.max(self.start);
            let to = range.end.min(self.start + len);
            if from < to {
                target[from - self.start..to - self.start]
                    .copy_from_slice(&values.read()[from - range.start..to - range.start]);
            }
        }
        Ok(())
    }
}
