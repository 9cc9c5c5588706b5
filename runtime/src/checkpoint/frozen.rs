//! The digest of the frozen parameters, by which a checkpoint without them recognizes its model.

use hsdp_kernels::unpack;
use hsdp_sharding::{ALIGNMENT, Axis, ParamId, Rank, UnitId};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::portions::{self, Portion};
use crate::error::Error;
use crate::state::context::{Context, ErrorSite};
use crate::state::shard::HostShard;

/// Elements of a block, which has a hash of its own. Parameters are cut at multiples of it, so each
/// block lies on one rank.
const BLOCK: usize = 32;

const _: () = assert!(ALIGNMENT.is_multiple_of(BLOCK), "a cut goes through no block");

/// Returns this rank's part of the digest of the parameters that `has` selects, such as the frozen
/// ones: the parts of the first replica sum up to the digest, on every mesh. `kept` returns all
/// selected parameters in a shard.
pub(super) fn part(
    site: ErrorSite<'_>,
    kept: impl Fn(UnitId) -> Result<HostShard, Error>,
    has: impl Fn(ParamId) -> bool,
) -> Result<u64, Error> {
    let mut portions = portions::of_rank(site.context);
    portions.retain(|portion| has(portion.parameter));
    let mut sum = 0_u64;
    for of_unit in portions.chunk_by(|one, next| one.parameter.unit == next.parameter.unit) {
        let kept = kept(of_unit[0].parameter.unit)?;
        let parts = of_unit.iter().map(|portion| of_portion(&kept, portion));
        sum = parts.fold(sum, u64::wrapping_add);
    }
    Ok(sum)
}

/// Returns the digest, the sum of the parts of the first replica.
pub(super) fn of_parts(context: &Context, parts: &[u64]) -> u64 {
    let first_replica = context.plan.mesh().group(Axis::Shard, Rank::new(0));
    first_replica.iter().fold(0, |sum, rank| sum.wrapping_add(parts[rank.index()]))
}

fn of_portion(kept: &HostShard, portion: &Portion) -> u64 {
    let mut sum = 0_u64;
    let mut block = [0.0_f32; BLOCK];
    let name = xxh3_64(portion.name.as_bytes());
    let values = kept.values(portion.range.clone());
    for start in (0..values.len()).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min(values.len() - start)];
        unpack(block, values.slice(start..start + block.len()));
        let index = (portion.offset + start as u64) / BLOCK as u64;
        sum = sum.wrapping_add(of_block(name.wrapping_add(index), block));
    }
    sum
}

fn of_block(seed: u64, block: &[f32]) -> u64 {
    const { assert!(cfg!(target_endian = "little"), "elements are hashed as they lie") };
    xxh3_64_with_seed(bytemuck::cast_slice(block), seed)
}
