//! How a member's part of an operation goes by NCCL.

use std::sync::Arc;

use hsdp_kernels::cuda::Stream;
use hsdp_sharding::Rank;

use super::NcclError;
use super::collectives::{NotIssued, Prepared, issue_together};
use super::connected::SharedCommunicator;
use super::queue::Queue;
use super::transfer::Transfer;
use crate::backend::thread::Access;
use crate::call::Issuing;
use crate::handle::RankHandle;
use crate::{Error, GroupId, Op};

/// A member's way to the others.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    rank: Rank,
    step: u64,
    pub(super) comm: SharedCommunicator,
    pub(super) stream: Arc<Stream>,
    access: Arc<Access>,
    /// Where the others are processes.
    pub(super) queue: Option<Arc<Queue>>,
    issuing: Option<Issuing>,
}

impl Link {
    /// That of a rank in a group, if its operations on devices go by NCCL.
    pub(crate) fn of(handle: &RankHandle, group: GroupId, step: u64) -> Option<Self> {
        let access = Arc::clone(handle.access()?);
        let (comm, stream, queue) = handle.nccl.of(group)?;
        Some(Self { rank: handle.rank, step, comm, stream, access, queue, issuing: None })
    }

    /// The operation that is issued by the calls that follow.
    pub(crate) fn issues(&mut self, issuing: Issuing) {
        self.issuing = Some(issuing);
    }

    /// Makes one call of NCCL of all members that are in this process: together, or this rank's own in its turn.
    ///
    /// # Errors
    /// Of this call alone, which was not made. One that NCCL refuses in the midst of it ends the world.
    pub(crate) fn carry(links: &[Self], op: Op, transfers: Vec<Transfer<'_>>) -> Result<(), Error> {
        let own = &links[0];
        let turn = match (&own.queue, &own.issuing) {
            (Some(queue), Some(issuing)) => {
                Some((queue, issuing, queue.begin(&own.access, &issuing.told)?))
            }
            _ => None,
        };
        let mut held: Vec<_> = links.iter().map(|link| link.comm.lock()).collect();
        let mut calls: Vec<Prepared<'_>> = Vec::with_capacity(links.len());
        for ((link, comm), transfer) in links.iter().zip(&held).zip(transfers) {
            let call = comm.prepare(op, &link.stream, transfer);
            calls.push(call.map_err(|error| link.refused(op, error))?);
        }
        if let Some((queue, issuing, _)) = &turn {
            queue.note(&own.access, issuing, calls[0].wire)?;
        }
        let issued = issue_together(calls).and_then(|()| {
            if let Some((queue, ..)) = &turn {
                queue.issued(own.stream.moment()?);
            }
            Ok(())
        });
        issued.map_err(|NotIssued { slot, error }| {
            // No rank knows how many of the calls are done.
            held.iter_mut().for_each(|comm| comm.give_up());
            // The end is waited for, and nobody waits for a communicator meanwhile.
            drop((held, turn));
            let error = links[slot].refused(op, *error);
            own.access.end_requested(links[slot].rank, &error.to_string());
            own.access.status().world_end().unwrap_or(error)
        })
    }

    fn refused(&self, op: Op, error: NcclError) -> Error {
        let (rank, step) = (self.rank, self.step);
        match error {
            NcclError::Device(error) => Error::Device { op, rank, step, error },
            error => Error::Nccl { op, rank, step, error: Arc::new(error) },
        }
    }
}
