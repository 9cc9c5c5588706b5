//! A member's part of an operation that goes by NCCL.

use std::sync::Arc;

use hsdp_kernels::cuda::Stream;

use super::NcclError;
use super::collectives::{NotIssued, Prepared, issue_together};
use super::connected::SharedCommunicator;
use super::queue::CallQueue;
use super::transfer::Transfer;
use crate::backend::thread::OwnRank;
use crate::call::Issuing;
use crate::{Error, Op};

/// A member's means to have NCCL move the elements of a call.
#[derive(Clone, Debug)]
pub(crate) struct Carrier {
    pub(super) step: u64,
    pub(super) comm: SharedCommunicator,
    pub(super) stream: Arc<Stream>,
    pub(super) own: Arc<OwnRank>,
    /// `None` where all ranks are threads.
    pub(super) queue: Option<Arc<CallQueue>>,
    /// The operation that is issued by the calls that follow.
    pub(crate) issuing: Option<Issuing>,
}

impl Carrier {
    /// Makes one call of NCCL of all members that are in this process: together, or this rank's own in its turn.
    ///
    /// # Errors
    /// Of this call alone, which was not made. One that NCCL refuses in the midst of it ends the world.
    pub(crate) fn carry(
        carriers: &[Self],
        op: Op,
        transfers: Vec<Transfer<'_>>,
    ) -> Result<(), Error> {
        let first = &carriers[0];
        let queued = first.queue.as_ref().zip(first.issuing.as_ref());
        let turn = queued.map(|(queue, issuing)| queue.begin(&first.own, &issuing.compared));
        let turn = turn.transpose()?;
        let mut held: Vec<_> = carriers.iter().map(|carrier| carrier.comm.lock()).collect();
        let mut calls: Vec<Prepared<'_>> = Vec::with_capacity(carriers.len());
        for ((carrier, comm), transfer) in carriers.iter().zip(&held).zip(transfers) {
            let call = comm.prepare(op, &carrier.stream, transfer);
            calls.push(call.map_err(|error| carrier.not_made(op, error))?);
        }
        if let Some((queue, issuing)) = queued {
            queue.note(&first.own, issuing, calls[0].shape)?;
        }
        let issued = issue_together(calls)
            .and_then(|()| Ok(queued.map_or(Ok(()), |(queue, _)| queue.issued())?));
        issued.map_err(|NotIssued { slot, error }| {
            // No rank knows how many of the calls are done.
            held.iter_mut().for_each(|comm| comm.give_up());
            // The end is waited for: no other thread is to wait for a communicator meanwhile.
            drop((held, turn));
            carriers[slot].end(op, *error)
        })
    }

    /// Ends the world, since a call was not made.
    fn end(&self, op: Op, error: NcclError) -> Error {
        let left = self.queue.as_ref().zip(self.issuing.as_ref());
        let left = left.and_then(|(queue, issuing)| queue.left(&self.own, &issuing.compared));
        let error = self.refused(op, error);
        match left {
            Some(left) => self.own.core.end(left),
            None => {
                self.own.core.end_requested(self.own.rank, &error.to_string());
                self.own.status().world_end().unwrap_or(error)
            }
        }
    }

    /// Returns the error of a call that was not made: the end of the world, if that has aborted the
    /// communicator in the meantime.
    fn not_made(&self, op: Op, error: NcclError) -> Error {
        let is_aborted = matches!(error, NcclError::GivenUp { .. });
        let end = is_aborted.then(|| self.own.status().world_end()).flatten();
        end.unwrap_or_else(|| self.refused(op, error))
    }

    fn refused(&self, op: Op, error: NcclError) -> Error {
        let rank = self.own.rank;
        let step = self.step;
        match error {
            NcclError::Device(error) => Error::Device { op, rank, step, error },
            error => Error::Nccl { op, rank, step, error: Arc::new(error) },
        }
    }
}
