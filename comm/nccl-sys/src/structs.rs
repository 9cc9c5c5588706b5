//! NCCL's structs, and the values of their initializers.
//!
//! A struct of options begins with its size and with the version of its header. NCCL reads min(size, its own size) bytes,
//! and replaces fields that a smaller version does not have
//! (`parseCommConfig` in its `src/init.cc`, in every release with a tag from 2.18.1 to 2.30.7; `ncclGroupEndInternal` in
//! `src/group.cc` for [`ncclSimInfo_t`]). So an older library accepts the newest struct, as long as newer fields stay
//! undefined. The source of 2.31 and 2.32 has no tag, so this crate does not rely on that: `fitting` makes the same
//! struct as the library's own header. New fields were only added at the end, some of them in padding: the struct of
//! 2.26 is no larger than that of 2.25.

use std::mem::offset_of;
use std::os::raw::{c_char, c_int, c_uint};
use std::ptr::{null, null_mut};

use crate::declared::{Field, Struct};
use crate::{
    NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, NCCL_UNDEF_FLOAT, NCCL_UNIQUE_ID_BYTES, Version,
    cudaEvent_t, ncclConfigExt_t, ncclEncryptionMode_t,
};

/// Bytes of a struct in the header of this version: up to the first field that it does not have, rounded up by alignment.
fn known_bytes<T>(fields: &[Field], version: Version) -> usize {
    let newer = fields.iter().find(|field| !field.presence.is_in(version));
    newer.map_or(size_of::<T>(), |field| field.offset.next_multiple_of(align_of::<T>()))
}

structs! {
    /// The id by which ranks find each other. One rank makes it; the program sends it to the others.
    ncclUniqueId {
        /// Private to NCCL.
        internal: [c_char; NCCL_UNIQUE_ID_BYTES];
    }

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
        /// A number of [`ncclHostCftMode_t`](crate::ncclHostCftMode_t).
        hostCftMode: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 31, 2);
        /// A number of [`ncclNvlsHostMode_t`](crate::ncclNvlsHostMode_t).
        nvlsHostMode: c_int = NCCL_CONFIG_UNDEF_INT, since(2, 32, 3);
    }

    /// Options of one collective, the same on all ranks.
    ncclCollConfig_t since(2, 31, 2) {
        /// Bytes of this struct.
        size: usize = size_of::<Self>();
        /// Whether it was initialized.
        magic: c_uint = NCCL_API_MAGIC;
        /// The version of the header.
        version: c_uint = Version::NEWEST.code();
        /// Options of vendors.
        ext: *mut ncclConfigExt_t = null_mut();
        /// The least number of blocks.
        minCTAs: c_int = NCCL_CONFIG_UNDEF_INT;
        /// The largest number of blocks.
        maxCTAs: c_int = NCCL_CONFIG_UNDEF_INT;
        /// Blocks for NVLink SHARP.
        nvlsCTAs: c_int = NCCL_CONFIG_UNDEF_INT;
        /// Blocks in a cluster of a GPU.
        cgaClusterSize: c_int = NCCL_CONFIG_UNDEF_INT;
        /// The algorithms to choose from.
        algSelection: *const c_char = null();
        /// 1 if the collective fails when none of them can be used.
        forceAlgSelection: c_int = 1;
        /// One of `NCCL_CTA_POLICY_*`.
        CTAPolicy: c_int = NCCL_CONFIG_UNDEF_INT;
        /// Passed to profilers unchanged.
        userProfilerTag: u64 = 0;
        /// Recorded when the collective's kernel has been launched.
        launchCompletionEvent: cudaEvent_t = null_mut(), since(2, 32, 3);
    }

    /// The result of `ncclGroupSimulateEnd`.
    ncclSimInfo_t since(2, 22, 3) {
        /// Bytes of this struct.
        size: usize = size_of::<Self>();
        /// Whether it was initialized.
        magic: c_uint = 0x7468_5283;
        /// The version of the header.
        version: c_uint = Version::NEWEST.code();
        /// The estimated time of the group.
        estimatedTime: f32 = NCCL_UNDEF_FLOAT;
    }

    /// The signals that `ncclWaitSignal` waits for.
    ncclWaitSignalDesc_t since(2, 29, 2) {
        /// The number of signals.
        opCnt: c_int;
        /// The rank that sends them.
        peer: c_int;
        /// The index of the signal.
        sigIdx: c_int;
        /// The context.
        ctx: c_int;
    }

    /// The encryption of NCCL's sockets.
    ncclEncryptionConfig_t since(2, 32, 3) {
        /// Bytes of this struct.
        size: usize = size_of::<Self>();
        /// Whether it was initialized.
        magic: c_uint = NCCL_API_MAGIC;
        /// The version of the header.
        version: c_uint = Version::NEWEST.code();
        /// A number of [`ncclEncryptionMode_t`].
        mode: c_int = ncclEncryptionMode_t::NCCL_ENCRYPTION_MODE_NONE.0;
        /// The key.
        psk: *const c_char = null();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `sizeof(ncclConfig_t)` in the headers of NCCL, from a C compiler for x86-64.
    #[cfg(target_pointer_width = "64")]
    #[test]
    fn a_config_has_the_size_and_version_of_the_library_that_reads_it() {
        let of_headers = [
            ((2, 18, 1), 48),
            ((2, 21, 5), 48),
            ((2, 25, 1), 48),
            ((2, 26, 2), 48),
            ((2, 26, 6), 48),
            ((2, 27, 3), 72),
            ((2, 27, 7), 72),
            ((2, 28, 3), 80),
            ((2, 28, 9), 80),
            ((2, 29, 2), 88),
            ((2, 29, 7), 88),
            ((2, 30, 3), 96),
            ((2, 30, 7), 96),
            ((2, 31, 2), 112),
            ((2, 32, 3), 120),
        ];
        for ((major, minor, patch), size) in of_headers {
            let version = Version::new(major, minor, patch);
            let config = ncclConfig_t::fitting(version);
            assert_eq!((config.size, config.version), (size, version.code()), "{version}");
        }
    }

    #[test]
    fn a_library_that_is_newer_gets_the_newest_config_that_is_known() {
        let config = ncclConfig_t::fitting(Version::new(3, 0, 0));
        let newest = (size_of::<ncclConfig_t>(), Version::NEWEST.code());
        assert_eq!((config.size, config.version), newest);
        assert_eq!(config.magic, 0xcafe_beef);
    }

    /// Also the fields in the padding behind the last field that an older library has.
    #[test]
    fn everything_is_left_to_nccl() {
        let config = ncclConfig_t::fitting(Version::OLDEST);
        assert!(config.netName.is_null() && config.commName.is_null());
        let numbers = [
            config.blocking,
            config.minCTAs,
            config.maxCTAs,
            config.splitShare,
            config.trafficClass,
            config.maxP2pPeers,
            config.graphStreamOrdering,
            config.nvlsHostMode,
        ];
        assert_eq!(numbers, [c_int::MIN; 8]);
    }
}
