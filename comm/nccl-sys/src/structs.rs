//! NCCL's structs and handles.
//!
//! A struct of options begins with its size and with the version of its header. NCCL reads min(size, its own size) bytes,
//! and replaces fields that a smaller version does not have (`parseCommConfig` in its `src/init.cc`, in every release with a
//! tag from 2.18.1 to 2.30.7). So an older library accepts the newest struct, as long as newer fields stay undefined. The source of 2.31 and 2.32 has no tag, so this crate does not rely on that: `fitting` makes the same
//! struct as the library's own header. New fields were only added at the end, some of them in padding: the struct of
//! 2.26 is no larger than that of 2.25.

use std::marker::{PhantomData, PhantomPinned};
use std::mem::offset_of;
use std::os::raw::{c_char, c_int, c_uint};
use std::ptr::null;

use crate::declare::{Field, Struct};
use crate::{NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_UNIQUE_ID_BYTES, Version};

/// The content of a struct that is private to NCCL or CUDA: not `Send`, `Sync` or `Unpin`, since it is unknown.
type Private = PhantomData<(*mut u8, PhantomPinned)>;

/// The target of an [`ncclComm_t`].
#[repr(C)]
#[derive(Debug)]
pub struct ncclComm([u8; 0], Private);

/// A communicator: one rank's place in a group of GPUs.
pub type ncclComm_t = *mut ncclComm;

/// The target of a [`cudaStream_t`].
#[repr(C)]
#[derive(Debug)]
pub struct CUstream_st([u8; 0], Private);

/// A stream of CUDA's runtime; the same pointer as the driver's `CUstream`.
pub type cudaStream_t = *mut CUstream_st;

fields! {
    /// The id by which ranks find each other. One rank makes it; the program sends it to the others.
    ncclUniqueId {
        /// Private to NCCL.
        internal: [c_char; NCCL_UNIQUE_ID_BYTES];
    }
}

fields! {
    /// Options of a communicator. [`Nccl::config`](crate::Nccl::config) makes one that fits the library.
    ncclConfig_t {
        /// Bytes of this struct.
        size: usize = size_of::<Self>();
        /// Whether it was initialized.
        magic: c_uint = NCCL_API_MAGIC;
        /// The version of the header.
        version: c_uint = Version::NEWEST.code();
        /// 0 if calls may return `ncclInProgress`, 1 if they block.
        blocking: c_int = NCCL_CONFIG_UNDEF_INT;
        /// Blocks in a cluster of a GPU.
        cgaClusterSize: c_int = NCCL_CONFIG_UNDEF_INT;
        /// The least number of blocks for a collective.
        minCTAs: c_int = NCCL_CONFIG_UNDEF_INT;
        /// The largest number of blocks.
        maxCTAs: c_int = NCCL_CONFIG_UNDEF_INT;
        /// The network to use.
        netName: *const c_char = null();
        /// 1 if a split shares the resources of its parent.
        splitShare: c_int = NCCL_CONFIG_UNDEF_INT;
        /// The traffic class of the network.
        trafficClass: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 26, 2);
        /// A name for logs.
        commName: *const c_char = null(), since(2, 27, 3);
        /// 1 if InfiniBand SHARP is used.
        collnetEnable: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 27, 3);
        /// One of `NCCL_CTA_POLICY_*`.
        CTAPolicy: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 27, 3);
        /// 1 if a smaller communicator shares the resources of its parent.
        shrinkShare: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 27, 3);
        /// Blocks for NVLink SHARP.
        nvlsCTAs: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 27, 3);
        /// Channels between two ranks over the network.
        nChannelsPerNetPeer: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 28, 3);
        /// 1 if schedules are centered on NVLink.
        nvlinkCentricSched: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 28, 3);
        /// 0 if it is used in no CUDA graph, 1 if in one, 2 if in several or also outside of them.
        graphUsageMode: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 29, 2);
        /// Contexts for one-sided operations.
        numRmaCtx: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 29, 2);
        /// Peers that a rank sends to and receives from at one time, at most.
        maxP2pPeers: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 30, 3);
        /// 1 if kernels that a CUDA graph captures are ordered.
        graphStreamOrdering: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 30, 7);
        /// As the variable `NCCL_LAUNCH_ORDER_IMPLICIT`, for this communicator.
        launchOrderImplicit: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 31, 2);
        /// Signals for one-sided operations.
        numRmaSig: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 31, 2);
        /// 1 if one-sided operations are initialized eagerly.
        rmaEagerInit: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 31, 2);
        /// A number of `ncclHostCftMode_t`.
        hostCftMode: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 31, 2);
        /// A number of `ncclNvlsHostMode_t`.
        nvlsHostMode: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 32, 3);
    }
}

impl ncclConfig_t {
    /// The initializer for a library of this version. Size and version are those of that library's own struct, so
    /// the library reads no field that it does not know. A value in such a field has no effect.
    #[must_use]
    pub fn fitting(library: Version) -> Self {
        let known = library.min(Version::NEWEST);
        // Up to the first field that its header does not have, rounded up by alignment.
        let newer = Self::STRUCT.fields.iter().find(|field| known < field.since);
        let size = newer
            .map_or(size_of::<Self>(), |field| field.offset.next_multiple_of(align_of::<Self>()));
        Self { size, version: known.code(), ..Self::INITIALIZER }
    }
}

pub(crate) const DECLARED: &[Struct] = &[ncclUniqueId::STRUCT, ncclConfig_t::STRUCT];

#[cfg(test)]
mod tests;
