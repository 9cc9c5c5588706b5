//! NCCL's functions.
//!
//! "Called by all ranks" means: by every rank of the communicator, in the same order as other such calls. Buffers are
//! addresses that the communicator's GPU can reach, counts are elements. Functions with a stream return when the work is
//! enqueued.

use std::os::raw::{c_char, c_int, c_void};

use crate::declare::Function;
use crate::library::Library;
use crate::{
    Error, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};

functions! {
    /// Writes the code of the version ([`Version`](crate::Version)). Needs no GPU.
    ncclGetVersion(version: *mut c_int) -> ncclResult_t;
    /// Makes the id by which ranks find each other. Called by one rank, which sends the id to the others.
    ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t;
    /// Joins a communicator with options. Called by all its ranks.
    ncclCommInitRankConfig(
        comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int,
        config: *mut ncclConfig_t
    ) -> ncclResult_t;
    /// Ends a communicator's operations before it is destroyed. Called by all its ranks.
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
    /// Frees a communicator.
    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
    /// Frees a communicator and aborts the operations that still run on it. Other ranks need not take part.
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
    /// Makes a communicator of all ranks with the same color, ordered by key. Called by all ranks of the parent.
    ncclCommSplit(
        comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t
    ) -> ncclResult_t;
    /// A status in words: a string that lives as long as the process.
    ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    /// The last error of NCCL in words; perhaps not of the last call. A later error may overwrite it.
    ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    /// Writes the status of a communicator's operations so far.
    ncclCommGetAsyncError(
        comm: ncclComm_t, asyncError: *mut ncclResult_t
    ) -> ncclResult_t;
    /// Writes the number of ranks.
    ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
    /// Writes the rank of the caller.
    ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
    /// Reduces `count` elements of each rank into a buffer on every rank. Called by all ranks.
    ncclAllReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    /// Reduces n x `recvcount` elements of each of n ranks; each gets its own `recvcount`. Called by all ranks.
    ncclReduceScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    /// Copies `sendcount` elements of each rank to every rank, in order of rank. Called by all ranks.
    ncclAllGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    /// Begins a group: the calls of this thread until its end are launched together.
    ncclGroupStart() -> ncclResult_t;
    /// Ends a group and enqueues its calls.
    ncclGroupEnd() -> ncclResult_t;
}
