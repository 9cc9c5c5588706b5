//! Whether ranks wait for each other, so that none of them can go on. PROTOCOL.md, "Circles".

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::core::Core;
use crate::engine::Operation;
use crate::mismatch::{Mismatch, MismatchRow, Wanted};
use crate::{Descriptor, Error};

/// What a rank is stuck in: an operation that it came to, and that others miss in.
struct Stuck {
    operation: Arc<Operation>,
    data_header: Arc<Descriptor>,
    missing: Vec<Rank>,
}

impl Stuck {
    /// `None` if `rank` is not there, or all others are.
    fn of(rank: Rank, operation: Arc<Operation>) -> Option<Self> {
        let (data_header, missing) = operation.gathering(rank)?;
        Some(Self { operation, data_header, missing })
    }

    fn is_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.operation, &other.operation) && self.missing == other.missing
    }
}

/// The ranks that wait for each other, and what each is stuck in.
type Circle = BTreeMap<Rank, Stuck>;

impl Core {
    /// Ends the world if `waiter`, who waits for `operation`, waits for ranks that all wait for each other.
    pub(super) fn end_if_circle(&self, waiter: Rank, operation: &Arc<Operation>) {
        if let Some(endpoint) = self.endpoint() {
            return endpoint.probe(self, operation);
        }
        let Some(once) = self.circle(waiter, operation) else { return };
        let Some(again) = self.circle(waiter, operation) else { return };
        let is_same = |((rank, stuck), (other, still)): ((&Rank, &Stuck), (&Rank, &Stuck))| {
            rank == other && stuck.is_as(still)
        };
        // If no rank has moved, there was a moment at which all of them were stuck.
        if once.len() == again.len() && once.iter().zip(&again).all(is_same) {
            self.end(circle_error(again));
        }
    }

    /// The ranks that are reached from `waiter` by way of those that miss in what they wait for, if all of them are stuck.
    fn circle(&self, waiter: Rank, operation: &Arc<Operation>) -> Option<Circle> {
        let first = Stuck::of(waiter, Arc::clone(operation))?;
        let (mut circle, mut awaited) = (Circle::new(), first.missing.clone());
        while let Some(rank) = awaited.pop() {
            if circle.contains_key(&rank) {
                continue;
            }
            let stuck = self.stuck(rank)?;
            awaited.extend(&stuck.missing);
            circle.insert(rank, stuck);
        }
        // If no rank waits for the waiter, its other calls help none of them.
        circle.entry(waiter).or_insert(first);
        Some(circle)
    }

    /// What `rank` is stuck in: only those that miss in it can have it issue again.
    fn stuck(&self, rank: Rank) -> Option<Stuck> {
        let record = self.record(rank);
        if record.has_left() {
            return None;
        }
        Stuck::of(rank, record.issuer_blocked_on()?)
    }
}

fn circle_error(circle: Circle) -> Error {
    let row = |(rank, Stuck { data_header, missing, .. })| MismatchRow {
        rank,
        wanted: Wanted::Waiting { operation: data_header, missing },
    };
    waiting_for_each_other(circle.into_iter().map(row).collect())
}

/// The error that says that these ranks wait for each other.
pub(crate) fn waiting_for_each_other(rows: Vec<MismatchRow>) -> Error {
    let problem = "ranks wait for each other in different operations".to_owned();
    Error::CollectiveMismatch { table: Arc::new(Mismatch { problem, rows }) }
}
