//! A step that is given up, on devices: the calls of NCCL that each rank has to make, so that the members of each group have made the
//! same. `NCCL.md`, "A step that is given up".

use std::collections::{BTreeMap, BTreeSet};

use hsdp_sharding::{DType, Rank};
use serde::{Deserialize, Serialize};

use super::header::read;
use crate::rolling::RollingHash;
use crate::{GroupId, Op};

/// The elements that a call of NCCL moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CallShape {
    /// Gathers, reduce-scatters and all-reduces.
    pub(crate) op: Op,
    pub(crate) dtype: DType,
    /// The elements of one rank: of its input to a gather, of its output from another.
    pub(crate) count: usize,
}

/// The epoch of a call, and its number among the calls of its rank in that epoch, from 0.
pub(crate) type CallNumber = (u64, u64);

/// A call of NCCL that a rank has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceCall {
    pub(crate) group: GroupId,
    /// Its number among the calls of its group.
    pub(crate) index: u64,
    pub(crate) number: CallNumber,
    /// The hash of its group after it.
    pub(crate) hash: RollingHash,
    pub(crate) shape: CallShape,
}

/// The calls of a rank that makes no more of them in an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Calls {
    /// The number of calls of each of its groups.
    pub(crate) counts: Vec<(GroupId, u64)>,
    /// The last of them: those that may not be done.
    pub(crate) unfinished: Vec<DeviceCall>,
}

impl Calls {
    /// The calls that this rank has to make, in order, where `members` are all ranks of its groups.
    ///
    /// A call is done on no member before all members have made it. So one that this rank has not made is unfinished on a rank that has
    /// made it.
    ///
    /// # Errors
    /// The call that no rank describes.
    pub(crate) fn owed(&self, members: &[&Self]) -> Result<Vec<DeviceCall>, String> {
        let mut owed = Vec::new();
        for (group, own) in &self.counts {
            let counts = members.iter().filter_map(|other| other.count(*group));
            for index in *own..counts.max().unwrap_or(0) {
                let is_it = |call: &&DeviceCall| call.group == *group && call.index == index;
                let call = members.iter().find_map(|other| other.unfinished.iter().find(is_it));
                let call = call.ok_or_else(|| {
                    format!("no rank describes call {index} of NCCL in group {:#x}", group.get())
                })?;
                owed.push(call.clone());
            }
        }
        owed.sort_by_key(|call| call.number);
        Ok(owed)
    }

    /// Those before the first call of each group that may not be done: this rank aborts the others.
    pub(crate) fn done(mut self) -> Self {
        for (group, count) in &mut self.counts {
            let of_group = self.unfinished.iter().filter(|call| call.group == *group);
            *count = of_group.map(|call| call.index).fold(*count, u64::min);
        }
        self.unfinished.clear();
        self
    }

    fn count(&self, group: GroupId) -> Option<u64> {
        self.counts.iter().find(|(known, _)| *known == group).map(|(_, count)| *count)
    }
}

/// In place of an epoch: of calls before their rank left.
pub(crate) const ALL_EPOCHS: u64 = u64::MAX;

/// The statements that a rank may have made that this one has not used: of the epoch that this one drains, of the next one, which a rank
/// can only end when this one has told its calls of the first, and of all before it left.
const MOST_OF_A_RANK: usize = 3;

/// The calls of other ranks, as they come, by epoch and rank.
#[derive(Default)]
pub(crate) struct Drains(BTreeMap<(u64, Rank), Calls>);

impl Drains {
    /// # Errors
    /// If there are calls of this rank and epoch, or more of this rank than there can be.
    pub(super) fn put(&mut self, from: Rank, epoch: u64, calls: Calls) -> Result<(), String> {
        if self.0.keys().filter(|(_, rank)| *rank == from).count() >= MOST_OF_A_RANK {
            return Err(format!(
                "it says for too many epochs which calls of NCCL it made, also for {epoch}"
            ));
        }
        match self.0.insert((epoch, from), calls) {
            None => Ok(()),
            Some(_) => {
                Err(format!("it says twice which calls of NCCL it made until epoch {epoch}"))
            }
        }
    }

    /// The ranks of `peers` whose calls until the end of `epoch` have not come.
    pub(crate) fn missing(&self, epoch: u64, peers: &BTreeSet<Rank>) -> Vec<Rank> {
        let is_missing = |rank: &&Rank| !self.0.contains_key(&(epoch, **rank));
        peers.iter().filter(is_missing).copied().collect()
    }

    /// The rank that has left without a call of one of its groups, if one has.
    pub(crate) fn left_before(&self, group: GroupId, index: u64) -> Option<Rank> {
        let is_short = |calls: &Calls| calls.count(group).is_some_and(|count| count <= index);
        let mut left = self.0.iter().filter(|((of, _), _)| *of == ALL_EPOCHS);
        left.find(|(_, calls)| is_short(calls)).map(|((_, rank), _)| *rank)
    }

    /// Takes those of an epoch, in rank order.
    pub(crate) fn take(&mut self, epoch: u64) -> Vec<Calls> {
        let of_epoch = self.0.extract_if(.., |(of, _), _| *of == epoch);
        of_epoch.map(|(_, calls)| calls).collect()
    }
}

/// The ops of calls.
const OPS: [Op; 3] = [Op::AllGather, Op::ReduceScatter, Op::AllReduce];

/// The dtypes of calls.
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The calls of a rank until the end of an epoch, of their bytes.
///
/// # Errors
/// The problem of the bytes.
pub(crate) fn calls_of(encoded: &[u8]) -> Result<(u64, Calls), String> {
    let (epoch, calls) = read::<(u64, Calls)>(encoded)?;
    let is_known = |shape: &CallShape| OPS.contains(&shape.op) && DTYPES.contains(&shape.dtype);
    match calls.unfinished.iter().map(|call| call.shape).find(|shape| !is_known(shape)) {
        Some(CallShape { op, dtype, .. }) => Err(format!("there is no {op} of {dtype} by NCCL")),
        None => Ok((epoch, calls)),
    }
}

#[cfg(test)]
mod tests;
