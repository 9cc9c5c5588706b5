//! The bytes that a step must move at the least.

use hsdp::{Accumulation, DType, FullCopies};

use crate::options::Options;

/// Bytes that all ranks together read and write, if nothing is read or written twice and caches
/// keep nothing from one pass to the next.
pub(crate) fn of_a_step(options: &Options) -> u64 {
    let mesh = options.mesh;
    let microbatches = u64::from(options.microbatches);
    let ranks = mesh.world_size() as u64;
    let elements = u64::from(options.units) * u64::from(options.numel);
    let shard = elements / mesh.shard_size() as u64;
    let full = elements * options.param_dtype.size_bytes() as u64;
    let f32s = |elements: u64| elements * DType::F32.size_bytes() as u64;
    // Twice a microbatch: every shard is read once, in the compute dtype, of one replica where
    // ranks share a copy, and every copy is written.
    let (rows, copies) = match options.full_copies {
        FullCopies::PerRank => (mesh.replicate_size() as u64, ranks),
        FullCopies::PerProcess => (1, 1),
    };
    let gathers = 2 * microbatches * (rows + copies) * full;
    // Each gradient of the row is read once over all owners; the partial is read and written, but
    // at first only written. Unsharded, they are first added up, each to a sum that is read and
    // written, but at first only written.
    let reductions = match options.mode {
        Accumulation::Local => {
            microbatches * full
                + (2 * microbatches - 1) * f32s(elements)
                + f32s(elements)
                + f32s(shard)
        }
        _ => microbatches * full + (2 * microbatches - 1) * f32s(shard),
    };
    let all_reduces = match options.mode {
        Accumulation::Every => microbatches,
        _ => 1,
    };
    let replicas = if mesh.replicate_size() > 1 { 2 * f32s(shard) * all_reduces } else { 0 };
    gathers + ranks * (reductions + replicas)
}
