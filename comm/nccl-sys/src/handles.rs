//! Pointers to private types of NCCL and CUDA.

use std::marker::{PhantomData, PhantomPinned};

use crate::declared::Handle;

handles! {
    /// A communicator: one rank's place in a group of GPUs.
    ncclComm_t -> ncclComm;
    /// Memory that is registered with a communicator.
    ncclWindow_t -> ncclWindow_vidmem, since(2, 27, 3);
    /// A parameter of NCCL. The header of 2.30.4 writes `ncclParamHandle_t*` for the same pointer.
    ncclParamHandle_t -> ncclParamHandle, since(2, 30, 4);
    /// A stream of CUDA's runtime; the same pointer as the driver's `CUstream`.
    cudaStream_t -> CUstream_st;
    /// An event of CUDA's runtime; the same pointer as the driver's `CUevent`.
    cudaEvent_t -> CUevent_st;
}

/// Options of vendors, which NVIDIA's library ignores. This crate makes none: a list of them is null.
#[repr(C)]
#[derive(Debug)]
pub struct ncclConfigExt_t {
    unknown: [u8; 0],
    pinned: PhantomData<(*mut u8, PhantomPinned)>,
}
