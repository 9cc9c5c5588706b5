//! The end of MPI: each process receives the messages that are still on their way to it, until all
//! processes have come, and then they finalize.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::time::Duration;

use mpi_sys as ffi;

use super::{Locked, MpiLibrary, MpiRequest, answer, check, complete, constant, null_request};
use crate::engine::{Alarm, WaitClock};
use crate::mpi::error::MpiError;
use crate::mpi::job::TAGS;

/// The tag of the message which says that a process does not come to the end: no world has it.
const EARLY: c_int = TAGS;

/// The time for which a process stays after an early end: launchers kill the others as soon as one is gone, and they write their
/// flight records now.
const STAYS: Duration = Duration::from_millis(250);

/// The length of one sleep meanwhile.
const NAP: Duration = Duration::from_millis(1);

/// The call to which all processes come at the end.
const MEETING: &str = "MPI_Ireduce_scatter_block";

impl MpiLibrary {
    /// Ends MPI, when all processes have come to their ends.
    pub(super) fn end(&self) -> Result<(), MpiError> {
        if !self.is_ours || answer("MPI_Finalized", ffi::MPI_Finalized)? != 0 {
            return Ok(());
        }
        let locked = self.lock();
        if self.failed.load(Ordering::Relaxed) {
            locked.part();
            return Ok(());
        }
        locked.receive_rest()?;
        let mut block = self.block;
        // SAFETY: MP-2, the type is ours, and nothing of it is under way.
        check("MPI_Type_free", unsafe { ffi::MPI_Type_free(&raw mut block) })?;
        // SAFETY: MP-2, nothing is under way, and no call follows.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }
}

impl Locked<'_> {
    /// Tells the other processes not to wait for this one at the end.
    fn part(&self) {
        let others = (0..self.library.size).filter(|to| *to != self.library.rank);
        // A process that is gone cannot be told.
        let mut sending: Vec<_> = others.filter_map(|to| self.send(&[], to, EARLY).ok()).collect();
        let mut clock = WaitClock::until(STAYS);
        while clock.alarm() != Alarm::Deadline {
            sending.retain_mut(|request| matches!(request.test("MPI_Test"), Ok(false)));
            let _ = crossbeam::channel::never::<()>().recv_timeout(NAP);
        }
    }

    /// Receives messages for which no thread waits, such as a word of leave, until all processes
    /// have come to their ends and none of their messages is left: MPI is not finalized before. A
    /// process does not come while one of its messages is under way, and a long one is under way
    /// until it is received.
    fn receive_rest(&self) -> Result<(), MpiError> {
        let MpiLibrary { ref found, deadline, .. } = *self.library;
        let mut receiving = Vec::new();
        let sent = self.sent_here(|| self.receive_some(&mut receiving))?;
        let mut clock = WaitClock::until(deadline);
        while found.load(Ordering::Relaxed) < sent || !receiving.is_empty() {
            if clock.alarm() == Alarm::Deadline {
                return Err(MpiError::Late { call: "MPI_Imrecv", deadline });
            }
            self.receive_some(&mut receiving)?;
        }
        Ok(())
    }

    /// Returns the number of messages that all processes have sent to this one, when each has come
    /// to its end. Calls `meanwhile` again and again.
    fn sent_here(&self, meanwhile: impl FnMut() -> Result<(), MpiError>) -> Result<u64, MpiError> {
        let sent = self.library.sent.iter().map(|sent| sent.load(Ordering::Relaxed));
        // Never freed: where others do not come in time, MPI may read and write them later.
        let sent = Box::leak(sent.collect::<Box<[u64]>>());
        let here = Box::leak(Box::new(0_u64));
        let number = constant(&raw const ffi::RSMPI_UINT64_T);
        let sum = constant(&raw const ffi::RSMPI_SUM);
        let data = sent.as_ptr().cast::<c_void>();
        let to = (&raw mut *here).cast::<c_void>();
        let communicator = self.library.communicator;
        let mut request = null_request();
        // SAFETY: MP-2, a number for each process is read, one is written, and both are there for ever.
        let code = unsafe {
            ffi::MPI_Ireduce_scatter_block(data, to, 1, number, sum, communicator, &raw mut request)
        };
        check(MEETING, code)?;
        complete(MEETING, MpiRequest(request), self.library.deadline, meanwhile)?;
        Ok(*here)
    }

    /// Begins to receive the messages that have come, and forgets those that are received.
    ///
    /// # Errors
    /// If a process says that it does not come to the end.
    fn receive_some(&self, receiving: &mut Vec<MpiRequest>) -> Result<(), MpiError> {
        let any = constant(&raw const ffi::RSMPI_ANY_TAG);
        while let Some(found) = self.find(any)? {
            if found.tag == EARLY {
                return Err(MpiError::Early { process: found.from });
            }
            let mut bytes = Vec::new();
            let reserved = bytes.try_reserve_exact(found.bytes);
            reserved.map_err(|_| MpiError::NoMemory { bytes: found.bytes })?;
            bytes.resize(found.bytes, 0);
            // Never freed: where it does not come in time, MPI may write it later.
            receiving.push(self.receive(found, bytes.leak())?);
        }
        let tested = receiving.iter_mut().map(|request| request.test("MPI_Test"));
        let are_complete = tested.collect::<Result<Vec<_>, _>>()?;
        let mut are_complete = are_complete.into_iter();
        receiving.retain(|_| are_complete.next() == Some(false));
        Ok(())
    }
}
