//! What ranks receive in a step, and which of them most.

use hsdp_sharding::{Coordinate, Flow, Plan, Rank, Traffic};

/// The traffic of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct World {
    /// Of a step.
    pub(super) microbatches: u64,
    /// The first of the ranks that receive most.
    pub(super) busiest: Rank,
    /// How many ranks receive as much.
    pub(super) as_busy: usize,
    /// What it receives.
    pub(super) most: Traffic,
    /// What all ranks receive together.
    pub(super) total: Traffic,
}

impl World {
    /// Ranks of a shard group receive the same: what differs is how an all-reduce deals a shard out to its replicas.
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

    /// Counts the ranks of a shard group, of which each receives `traffic`.
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
