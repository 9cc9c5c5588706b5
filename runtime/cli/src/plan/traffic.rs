//! The bytes that ranks receive in a step, and the busiest rank.

use hsdp_sharding::{Coordinate, Flow, Plan, Rank, Traffic};

/// The traffic of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct World {
    /// The microbatches of a step.
    pub(super) microbatches: u64,
    /// The first of the ranks that receive the most bytes.
    pub(super) busiest: Rank,
    /// The number of ranks that receive as many bytes, the busiest included.
    pub(super) as_busy: usize,
    /// The traffic that it receives.
    pub(super) most: Traffic,
    /// The traffic that all ranks receive together.
    pub(super) total: Traffic,
}

impl World {
    /// The traffic of a plan. Ranks of a shard group receive the same. Replicas may differ, by the part of a shard that they have in
    /// an all-reduce.
    pub(super) fn of(plan: &Plan, microbatches: u64) -> Self {
        let (mesh, shards) = (plan.mesh(), plan.mesh().shard_size());
        let first = |replica| mesh.rank_at(Coordinate { replicate_index: replica, shard_index: 0 });
        let rank = first(0);
        let most = plan.traffic(rank, microbatches);
        let mut world =
            Self { microbatches, busiest: rank, as_busy: 0, most, total: Traffic::default() };
        for replica in 0..mesh.replicate_size() {
            world.add(first(replica), plan.traffic(first(replica), microbatches), shards);
        }
        world
    }

    /// Counts the ranks of a shard group. Each of them receives `traffic`.
    fn add(&mut self, rank: Rank, traffic: Traffic, shards: usize) {
        let [new, most] = [traffic, self.most].map(|traffic| traffic.total().bytes);
        if new > most {
            (self.busiest, self.most, self.as_busy) = (rank, traffic, 0);
        }
        self.as_busy += if new >= most { shards } else { 0 };
        let times = |flow: Flow| flow * shards as u64;
        self.total.all_gather += times(traffic.all_gather);
        self.total.reduce_scatter += times(traffic.reduce_scatter);
        self.total.all_reduce += times(traffic.all_reduce);
    }
}

/// The collectives by name.
pub(super) fn flows(traffic: &Traffic) -> [(&'static str, Flow); 3] {
    [
        ("all_gather", traffic.all_gather),
        ("reduce_scatter", traffic.reduce_scatter),
        ("all_reduce", traffic.all_reduce),
    ]
}
