//! The search for the smallest shard length at which every parameter may be cut where the
//! boundaries fall.
//!
//! Candidates are tried upwards from the length that the elements alone need. Bisection is not
//! possible, because a length may work (a multiple of a row group) where the next one does not. But
//! a parameter longer than two shards contains at least two boundaries, and their distance, the
//! shard length, must be a multiple of its chunk. That leaves few candidates where the search would
//! be long. A shard that holds the whole region always works, so the search ends.

use super::place::{Extent, ParamPlacing, fits, place};
use crate::multiples::lcm;

/// The number of candidates that are tried before the distance between them doubles, each time. It
/// limits the search to a few milliseconds, also for large row groups that do not fit each other.
const DENSE_CANDIDATES: u64 = 1 << 12;

/// The placement with the smallest possible shard length over `shards` shards. Without parameters
/// the shard length is 0.
pub(super) fn smallest(extents: &[Extent], shards: u64) -> ParamPlacing {
    let total: u64 = extents.iter().map(|extent| extent.blocks).sum();
    let lowest = total.div_ceil(shards);
    if lowest == 0 || extents.iter().all(|extent| extent.chunk == 1) {
        return place(extents, lowest);
    }
    let mut range_start = lowest;
    let mut thinning = Thinning::default();
    while range_start < total {
        let Candidates { end, step } = candidates_from(extents, range_start, total);
        let mut shard = next_multiple(range_start, step);
        while shard < end {
            if fits(extents, shards, shard) {
                return place(extents, shard);
            }
            shard = shard.saturating_add(step.saturating_mul(thinning.stride()));
        }
        range_start = end;
    }
    place(extents, total)
}

/// Shard lengths up to `end` of which only multiples of `step` can be possible.
struct Candidates {
    end: u64,
    step: u64,
}

fn candidates_from(extents: &[Extent], start: u64, total: u64) -> Candidates {
    let any = Candidates { end: total, step: 1 };
    extents.iter().filter(|extent| extent.blocks > 2 * start).fold(any, |range, extent| {
        Candidates {
            end: range.end.min(extent.blocks.div_ceil(2)),
            step: lcm(range.step, extent.chunk),
        }
    })
}

/// The distance of candidates, in steps.
#[derive(Default)]
struct Thinning {
    tried: u64,
}

impl Thinning {
    /// The distance to the next candidate, after one more has failed.
    fn stride(&mut self) -> u64 {
        self.tried += 1;
        1 << (self.tried / DENSE_CANDIDATES).min(u64::BITS as u64 - 1)
    }
}

/// The first multiple of `step` from `start` on, or `u64::MAX` beyond all ranges.
fn next_multiple(start: u64, step: u64) -> u64 {
    start.div_ceil(step).saturating_mul(step)
}
