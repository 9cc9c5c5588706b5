//! What must be the same on ranks and is compared: plans and options once, the bits of shards then and again later.

use std::sync::Arc;

use hsdp_comm::Stage;
use hsdp_sharding::Rank;

use crate::digest;
use crate::engine::fabric::Fabric;
use crate::error::Error;

/// A word that ranks compare: what it is, and with whom a rank compares its own.
struct Field {
    what: &'static str,
    counterpart: fn(&Fabric, Rank) -> Rank,
}

const PLAN: Field = Field { what: "the fingerprint of the plan", counterpart: first };
const OPTIONS: Field = Field { what: "the digest of the model's options", counterpart: first };
const INITIAL: Field =
    Field { what: "the initial value of a shard", counterpart: holder_of_same_shard };
const SHARD: Field = Field { what: "the content of a shard", counterpart: holder_of_same_shard };

fn first(_: &Fabric, _: Rank) -> Rank {
    Rank::new(0)
}

/// The first rank that holds the same shard.
fn holder_of_same_shard(fabric: &Fabric, rank: Rank) -> Rank {
    Rank::new(fabric.plan.mesh().coordinate(rank).shard_index)
}

/// Compares plan, options and initial shards with the other ranks. Collective over the world.
///
/// # Errors
/// [`Error::Disagreement`] on all ranks, which names the first that differs; [`Error::Comm`].
pub(crate) fn of_models(fabric: &Fabric, shards: &[Vec<f32>]) -> Result<(), Error> {
    let mine = vec![
        fabric.plan.fingerprint(),
        fabric.options.digest(),
        digest::of_parameters(shards.iter().map(Vec::as_slice)),
    ];
    let tag = fabric.tag(None, Stage::Setup, 0, 0);
    let said = fabric.control.all_gather(tag, mine)?.wait()?;
    // Field by field: only where all plans are the same do ranks mean the same by "the same shard".
    compare(fabric, &said, &[PLAN, OPTIONS, INITIAL])
}

/// Compares the bits of shards with the replicas, as they are before `step`. Collective over the world.
///
/// # Errors
/// As [`of_models`].
pub(crate) fn of_replicas(
    fabric: &Fabric,
    shards: &[Arc<Vec<f32>>],
    step: u64,
) -> Result<(), Error> {
    let mine = vec![digest::of_parameters(shards.iter().map(|shard| shard.as_slice()))];
    let tag = fabric.tag(None, Stage::Setup, step, 0);
    let said = fabric.control.all_gather(tag, mine)?.wait()?;
    compare(fabric, &said, &[SHARD])
}

fn compare(fabric: &Fabric, said: &[u64], fields: &[Field]) -> Result<(), Error> {
    for (word, Field { what, counterpart }) in fields.iter().enumerate() {
        for rank in fabric.plan.mesh().ranks() {
            let other = counterpart(fabric, rank);
            let [got, want] = [rank, other].map(|rank| said[rank.index() * fields.len() + word]);
            if got != want {
                let [got, want] = [got, want].map(|value| format!("{value:#018x}"));
                return Err(Error::Disagreement { what, rank, got, other, want });
            }
        }
    }
    Ok(())
}
