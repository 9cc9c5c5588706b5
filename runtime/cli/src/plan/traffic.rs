//! The bytes that ranks receive in a step, and the busiest rank.

use hsdp_sharding::{Coordinate, Flow, Plan, Rank, Traffic};

/// Traffic of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct World {
    /// Number of microbatches in a step.
    pub(super) microbatches: u64,
    /// First of the ranks that receive the most bytes.
    pub(super) busiest: Rank,
    /// Number of ranks that receive this many bytes, including the busiest.
    pub(super) as_busy: usize,
    /// Traffic that the busiest rank receives.
    pub(super) most: Traffic,
    /// Traffic that all ranks receive together.
    pub(super) total: Traffic,
}

impl World {
    /// Computes the traffic of a plan. Replicas differ by their part of a shard in an all-reduce.
    /// The ranks of a shard group differ by the matrices that they own in an update, and by their
    /// slice of its sums. Both add up, so the busiest rank is the busiest of the busiest replica.
    pub(super) fn of(plan: &Plan, microbatches: u64) -> Self {
        let mesh = plan.mesh();
        let rank = |replicate_index, shard_index| {
            mesh.rank_at(Coordinate { replicate_index, shard_index })
        };
        let of_step = |replica| {
            let all = plan.traffic(rank(replica, 0), microbatches);
            Traffic { update: Flow::NONE, ..all }
        };
        let of_update = |shard| {
            let update = plan.update(rank(0, shard)).flow();
            Traffic { update, ..Traffic::default() }
        };
        let replicas = Ranks::of((0..mesh.replicate_size()).map(of_step));
        let shards = Ranks::of((0..mesh.shard_size()).map(of_update));
        let all_steps = times(replicas.total, mesh.shard_size());
        let all_updates = times(shards.total, mesh.replicate_size());
        Self {
            microbatches,
            busiest: rank(replicas.busiest, shards.busiest),
            as_busy: replicas.as_busy * shards.as_busy,
            most: Traffic { update: shards.most.update, ..replicas.most },
            total: Traffic { update: all_updates.update, ..all_steps },
        }
    }

    /// Returns the collectives by name, on the busiest rank and on all ranks together, and the
    /// total at the end. `update` is present if a rank has it.
    pub(super) fn flows(&self) -> Vec<(&'static str, [Flow; 2])> {
        let of = |name, flow: fn(&Traffic) -> Flow| (name, [flow(&self.most), flow(&self.total)]);
        let mut flows = vec![
            of("all_gather", |it| it.all_gather),
            of("reduce_scatter", |it| it.reduce_scatter),
            of("all_reduce", |it| it.all_reduce),
        ];
        if self.total.update != Flow::NONE {
            flows.push(of("update", |it| it.update));
        }
        flows.push(of("total", Traffic::total));
        flows
    }
}

/// Traffic of some ranks.
#[derive(Debug, Default)]
struct Ranks {
    /// Index of the first rank that receives the most bytes.
    busiest: usize,
    /// Number of ranks that receive this many bytes.
    as_busy: usize,
    most: Traffic,
    total: Traffic,
}

impl Ranks {
    fn of(all: impl Iterator<Item = Traffic>) -> Self {
        let mut ranks = Self::default();
        for (index, traffic) in all.enumerate() {
            let [new, most] = [traffic, ranks.most].map(|traffic| traffic.total().bytes);
            if new > most {
                (ranks.busiest, ranks.as_busy) = (index, 0);
            }
            if new > most || index == 0 {
                ranks.most = traffic;
            }
            ranks.as_busy += usize::from(new >= most);
            ranks.total = sum(ranks.total, traffic);
        }
        ranks
    }
}

fn sum(one: Traffic, other: Traffic) -> Traffic {
    Traffic {
        all_gather: one.all_gather + other.all_gather,
        reduce_scatter: one.reduce_scatter + other.reduce_scatter,
        all_reduce: one.all_reduce + other.all_reduce,
        update: one.update + other.update,
    }
}

fn times(traffic: Traffic, ranks: usize) -> Traffic {
    let times = |flow: Flow| flow * ranks as u64;
    Traffic {
        all_gather: times(traffic.all_gather),
        reduce_scatter: times(traffic.reduce_scatter),
        all_reduce: times(traffic.all_reduce),
        update: times(traffic.update),
    }
}
