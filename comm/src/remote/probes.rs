//! Whether ranks that share no memory wait for each other. `REMOTE.md`, "Circles".
//!
//! After K. M. Chandy, J. Misra and L. M. Haas, "Distributed deadlock detection", ACM Transactions on Computer Systems 1 (1983): a probe
//! goes from who waits to those that it waits for. Who waits in turn, and has not come to what is waited for, passes it on. It comes back to
//! who sent it only along ranks none of which can go on before the next.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::endpoint::Endpoint;
use crate::backend::thread::{Core, Key, Operation, waiting_for_each_other};
use crate::mismatch::{MismatchRow, Wanted};
use crate::{Descriptor, GroupId};

/// How many probes are remembered.
const REMEMBERED: usize = 1 << 10;

/// The probes that this rank has passed on.
#[derive(Debug, Default)]
pub(super) struct Probes {
    /// Who sent them, waiting in what, and what this rank waited in.
    passed_on: HashSet<(Rank, Key, Key)>,
}

impl Probes {
    /// A probe has come.
    pub(super) fn follow(
        &mut self,
        (core, endpoint): (&Core, &Endpoint),
        own: Rank,
        mut path: Vec<MismatchRow>,
    ) {
        let (Some(first), Some(last)) = (path.first(), path.last()) else { return };
        let (Some(sent_for), Some(asked)) = (waited_for(first), waited_for(last)) else { return };
        let Some(operation) = core.record(own).issuer_blocked_on() else { return };
        let (sender, sent_for) = (first.rank, Key::from(&**sent_for));
        if endpoint.has_issued(asked) {
            return;
        }
        if sender == own {
            if operation.key() == sent_for {
                path.sort_by_key(|row| row.rank);
                core.end(waiting_for_each_other(path));
            }
            return;
        }
        if path.iter().any(|row| row.rank == own)
            || !self.is_new((sender, sent_for, operation.key()))
        {
            return;
        }
        if let Some(row) = stuck(core, own, &operation) {
            path.push(row);
            endpoint.send_probe(&path);
        }
    }

    fn is_new(&mut self, probe: (Rank, Key, Key)) -> bool {
        if self.passed_on.len() >= REMEMBERED {
            self.passed_on.clear();
        }
        self.passed_on.insert(probe)
    }
}

fn waited_for(row: &MismatchRow) -> Option<&Arc<Descriptor>> {
    match &row.wanted {
        Wanted::Waiting { operation, .. } => Some(operation),
        _ => None,
    }
}

/// What a rank of this process waits in with its only thread that issues, if it does in `operation`, and others are missing.
pub(super) fn stuck(core: &Core, rank: Rank, operation: &Arc<Operation>) -> Option<MismatchRow> {
    let blocked_on = core.record(rank).issuer_blocked_on()?;
    if !Arc::ptr_eq(&blocked_on, operation) {
        return None;
    }
    let (operation, missing) = operation.gathering(rank)?;
    Some(MismatchRow { rank, wanted: Wanted::Waiting { operation, missing } })
}

/// The operations that this rank has come to, by group: the numbers of a group come in order, but where a fault swaps them.
#[derive(Debug, Default)]
pub(super) struct Issued(HashMap<GroupId, Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    epoch: u64,
    next: u64,
    /// Those below `next` that were left out.
    skipped: BTreeSet<u64>,
}

impl Issued {
    pub(super) fn note(&mut self, descriptor: &Descriptor) {
        let numbers = self.0.entry(descriptor.group).or_default();
        if numbers.epoch != descriptor.epoch {
            *numbers = Numbers { epoch: descriptor.epoch, ..Numbers::default() };
        }
        let number = descriptor.sequence;
        if number < numbers.next {
            numbers.skipped.remove(&number);
        } else {
            numbers.skipped.extend(numbers.next..number);
            numbers.next = number + 1;
        }
    }

    pub(super) fn has(&self, descriptor: &Descriptor) -> bool {
        let Some(numbers) = self.0.get(&descriptor.group) else { return false };
        let is_of_this_epoch = || {
            descriptor.sequence < numbers.next && !numbers.skipped.contains(&descriptor.sequence)
        };
        // What is of an epoch before is over.
        descriptor.epoch < numbers.epoch
            || (descriptor.epoch == numbers.epoch && is_of_this_epoch())
    }
}
