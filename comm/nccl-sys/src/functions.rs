//! NCCL's functions.
//!
//! "Called by all ranks" means: by every rank of the communicator, in the same order as other such calls. Buffers are
//! addresses that the communicator's GPU can reach, counts are elements. Functions with a stream return when the work is
//! enqueued.

use std::os::raw::{c_char, c_int, c_uint, c_void};

use crate::declared::Function;
use crate::load::Library;
use crate::{
    Error, cudaStream_t, ncclCollConfig_t, ncclComm_t, ncclCommMemStat_t, ncclConfig_t,
    ncclDataType_t, ncclEncryptionConfig_t, ncclParamHandle_t, ncclRedOp_t, ncclResult_t,
    ncclScalarResidence_t, ncclSimInfo_t, ncclUniqueId, ncclWaitSignalDesc_t, ncclWindow_t,
};

functions! {
    /// Allocates at least `size` bytes of the current GPU, which can be registered.
    ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t, since(2, 19, 1);
    /// Frees memory of `ncclMemAlloc`.
    ncclMemFree(ptr: *mut c_void) -> ncclResult_t, since(2, 19, 1);
    /// Writes the code of the version ([`Version`](crate::Version)). Needs no GPU.
    ncclGetVersion(version: *mut c_int) -> ncclResult_t, required;
    /// Makes the id by which ranks find each other. Called by one rank, which sends the id to the others.
    ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t, required;
    /// Joins a communicator with options. Called by all its ranks.
    ncclCommInitRankConfig(
        comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int,
        config: *mut ncclConfig_t
    ) -> ncclResult_t, required;
    /// Joins a communicator. Called by all its ranks.
    ncclCommInitRank(
        comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int
    ) -> ncclResult_t, optional;
    /// Makes one communicator for GPUs of this process, and writes a handle for each of them.
    ncclCommInitAll(
        comm: *mut ncclComm_t, ndev: c_int, devlist: *const c_int
    ) -> ncclResult_t, optional;
    /// Ends a communicator's operations before it is destroyed. Called by all its ranks.
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t, required;
    /// Frees a communicator.
    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t, required;
    /// Frees a communicator and aborts the operations that still run on it. Other ranks need not take part.
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t, required;
    /// Stops the operations on a communicator, which can then be destroyed, split or shrunk.
    ncclCommRevoke(comm: ncclComm_t, revokeFlags: c_int) -> ncclResult_t, since(2, 28, 7);
    /// Makes a communicator of all ranks with the same color, ordered by key. Called by all ranks of the parent.
    ncclCommSplit(
        comm: ncclComm_t, color: c_int, key: c_int, newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t
    ) -> ncclResult_t, required;
    /// Makes a communicator without some ranks. Called by all ranks that remain.
    ncclCommShrink(
        comm: ncclComm_t, excludeRanksList: *mut c_int, excludeRanksCount: c_int,
        newcomm: *mut ncclComm_t, config: *mut ncclConfig_t, shrinkFlags: c_int
    ) -> ncclResult_t, since(2, 27, 3);
    /// Makes the id by which new ranks find a communicator, once for each time it grows.
    ncclCommGetUniqueId(
        comm: ncclComm_t, uniqueId: *mut ncclUniqueId
    ) -> ncclResult_t, since(2, 29, 2);
    /// Makes a communicator with more ranks. Called by all ranks of the old one, and by all new ranks.
    ncclCommGrow(
        comm: ncclComm_t, nRanks: c_int, uniqueId: *const ncclUniqueId, rank: c_int,
        newcomm: *mut ncclComm_t, config: *mut ncclConfig_t
    ) -> ncclResult_t, since(2, 29, 2);
    /// Joins a communicator by several ids, so that many ranks join faster. Called by all its ranks.
    ncclCommInitRankScalable(
        newcomm: *mut ncclComm_t, nranks: c_int, myrank: c_int, nId: c_int,
        commIds: *mut ncclUniqueId, config: *mut ncclConfig_t
    ) -> ncclResult_t, since(2, 23, 4);
    /// A status in words: a string that lives as long as the process.
    ncclGetErrorString(result: ncclResult_t) -> *const c_char, required;
    /// The last error of NCCL in words; perhaps not of the last call. A later error may overwrite it.
    ncclGetLastError(comm: ncclComm_t) -> *const c_char, required;
    /// Writes the status of a communicator's operations so far.
    ncclCommGetAsyncError(
        comm: ncclComm_t, asyncError: *mut ncclResult_t
    ) -> ncclResult_t, required;
    /// Writes the number of ranks.
    ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t, required;
    /// Writes the number of the communicator's GPU, as CUDA counts them.
    ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t, required;
    /// Writes the rank of the caller.
    ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t, required;
    /// Registers a buffer for operations without copies.
    ncclCommRegister(
        comm: ncclComm_t, buff: *mut c_void, size: usize, handle: *mut *mut c_void
    ) -> ncclResult_t, since(2, 19, 1);
    /// Ends the registration of `ncclCommRegister`.
    ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t, since(2, 19, 1);
    /// Releases resources of a communicator until it is resumed.
    ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t, since(2, 29, 7);
    /// Allocates the resources of a suspended communicator again.
    ncclCommResume(comm: ncclComm_t) -> ncclResult_t, since(2, 29, 7);
    /// Writes one number about a communicator's memory.
    ncclCommMemStats(
        comm: ncclComm_t, stat: ncclCommMemStat_t, value: *mut u64
    ) -> ncclResult_t, since(2, 29, 7);
    /// Registers a window with flags `NCCL_WIN_*`. Called by all ranks of the communicator.
    ncclCommWindowRegister(
        comm: ncclComm_t, buff: *mut c_void, size: usize, win: *mut ncclWindow_t, winFlags: c_int
    ) -> ncclResult_t, since(2, 27, 3);
    /// Ends the registration of `ncclCommWindowRegister`.
    ncclCommWindowDeregister(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t, since(2, 27, 3);
    /// Writes the address that a window was registered with.
    ncclWinGetUserPtr(
        comm: ncclComm_t, win: ncclWindow_t, outUserPtr: *mut *mut c_void
    ) -> ncclResult_t, since(2, 29, 2);
    /// Makes a reduction that multiplies each element by a scalar and sums the products, for one dtype and communicator.
    ncclRedOpCreatePreMulSum(
        op: *mut ncclRedOp_t, scalar: *mut c_void, datatype: ncclDataType_t,
        residence: ncclScalarResidence_t, comm: ncclComm_t
    ) -> ncclResult_t, optional;
    /// Frees a reduction of `ncclRedOpCreatePreMulSum`.
    ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t, optional;
    /// Reduces `count` elements of each rank into a buffer of `root`. Called by all ranks.
    ncclReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Copies a buffer of `root` over that of every rank, in place. Called by all ranks.
    ncclBcast(
        buff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t,
        stream: cudaStream_t
    ) -> ncclResult_t, optional;
    /// Copies `count` elements of `root` to every rank. Called by all ranks.
    ncclBroadcast(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Reduces `count` elements of each rank into a buffer on every rank. Called by all ranks.
    ncclAllReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Reduces n x `recvcount` elements of each of n ranks; each gets its own `recvcount`. Called by all ranks.
    ncclReduceScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Copies `sendcount` elements of each rank to every rank, in order of rank. Called by all ranks.
    ncclAllGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Copies the j-th `count` elements of rank i to the i-th place on rank j. Called by all ranks.
    ncclAlltoAll(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, since(2, 28, 3);
    /// Copies `count` elements of each rank to `root`, in order of rank. Called by all ranks.
    ncclGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, since(2, 28, 3);
    /// Copies the i-th `count` elements of `root` to rank i. Called by all ranks.
    ncclScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, since(2, 28, 3);
    /// The same as `ncclAllReduce`, with options.
    ncclAllReduceConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclBroadcast`, with options.
    ncclBroadcastConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclReduce`, with options.
    ncclReduceConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t,
        config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclAllGather`, with options.
    ncclAllGatherConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclReduceScatter`, with options.
    ncclReduceScatterConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclAlltoAll`, with options.
    ncclAlltoAllConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclGather`, with options.
    ncclGatherConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// The same as `ncclScatter`, with options.
    ncclScatterConfig(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t, config: *const ncclCollConfig_t
    ) -> ncclResult_t, since(2, 31, 2);
    /// Sends `count` elements to a rank, which receives as many of the same dtype.
    ncclSend(
        sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Receives `count` elements from a rank, which sends as many of the same dtype.
    ncclRecv(
        recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, required;
    /// Writes elements into a window of a rank, then signals it.
    ncclPutSignal(
        localbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int,
        peerWin: ncclWindow_t, peerWinOffset: usize, sigIdx: c_int, ctx: c_int, flags: c_uint,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, since(2, 29, 2);
    /// Signals a rank.
    ncclSignal(
        peer: c_int, sigIdx: c_int, ctx: c_int, flags: c_uint, comm: ncclComm_t,
        stream: cudaStream_t
    ) -> ncclResult_t, since(2, 29, 2);
    /// Waits for signals of ranks.
    ncclWaitSignal(
        nDesc: c_int, signalDescs: *mut ncclWaitSignalDesc_t, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t, since(2, 29, 2);
    /// Begins a group: the calls of this thread until its end are launched together.
    ncclGroupStart() -> ncclResult_t, required;
    /// Ends a group and enqueues its calls.
    ncclGroupEnd() -> ncclResult_t, required;
    /// Ends a group without enqueueing it, and writes an estimate of its time.
    ncclGroupSimulateEnd(simInfo: *mut ncclSimInfo_t) -> ncclResult_t, since(2, 22, 3);
    /// Has NCCL encrypt its data on TCP connections.
    ncclSetEncryption(config: *const ncclEncryptionConfig_t) -> ncclResult_t, since(2, 32, 3);
    /// Writes a handle to the parameter of this name. It is never freed.
    ncclParamBind(out: *mut ncclParamHandle_t, key: *const c_char) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as a signed number of 8 bits.
    ncclParamGetI8(h: ncclParamHandle_t, out: *mut i8) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as a signed number of 16 bits.
    ncclParamGetI16(h: ncclParamHandle_t, out: *mut i16) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as a signed number of 32 bits.
    ncclParamGetI32(h: ncclParamHandle_t, out: *mut i32) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as a signed number of 64 bits.
    ncclParamGetI64(h: ncclParamHandle_t, out: *mut i64) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as an unsigned number of 8 bits.
    ncclParamGetU8(h: ncclParamHandle_t, out: *mut u8) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as an unsigned number of 16 bits.
    ncclParamGetU16(h: ncclParamHandle_t, out: *mut u16) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as an unsigned number of 32 bits.
    ncclParamGetU32(h: ncclParamHandle_t, out: *mut u32) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as an unsigned number of 64 bits.
    ncclParamGetU64(h: ncclParamHandle_t, out: *mut u64) -> ncclResult_t, since(2, 30, 4);
    /// Writes a parameter as a string that lives until this thread asks for the next.
    ncclParamGetStr(h: ncclParamHandle_t, out: *mut *const c_char) -> ncclResult_t, since(2, 30, 4);
    /// Writes at most `maxLen` bytes of a parameter, and its length.
    ncclParamGet(
        h: ncclParamHandle_t, out: *mut c_void, maxLen: c_int, len: *mut c_int
    ) -> ncclResult_t, since(2, 30, 4);
    /// Writes the parameter of this name as a string that lives until this thread asks for the next.
    ncclParamGetParameter(
        key: *const c_char, value: *mut *const c_char, valueLen: *mut c_int
    ) -> ncclResult_t, since(2, 30, 4);
    /// Writes the names of all parameters: a table that lives until this thread asks for the next.
    ncclParamGetAllParameterKeys(
        table: *mut *mut *const c_char, tableLen: *mut c_int
    ) -> ncclResult_t, since(2, 30, 4);
    /// Writes all parameters to the log.
    ncclParamDumpAll(), since(2, 30, 4);
}
