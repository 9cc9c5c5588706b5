//! The numbers and the structs of `nccl.h`.
//!
//! Enums are integers, since a library may return numbers that only a newer header names. An enum that
//! functions return is declared as a whole, except for the number that counts the others
//! (`ncclNumResults`), which moves from version to version.
//!
//! A struct of options begins with its size and with the version of its header. NCCL reads min(size,
//! its own size) bytes, and replaces fields that a smaller version does not have (`parseCommConfig` in
//! its `src/init.cc`, in every release with a tag from 2.18.1 to 2.30.7). So an older library accepts
//! the newest struct, as long as newer fields stay undefined. The source of 2.31 and 2.32 has no tag,
//! so this crate does not rely on that: `fitting` makes the same struct as the library's own header. New
//! fields were only added at the end, some of them in padding: the struct of 2.26 is no larger than that
//! of 2.25.

use std::fmt;
use std::marker::{PhantomData, PhantomPinned};
use std::mem::offset_of;
use std::os::raw::{c_char, c_int, c_uint};
use std::ptr::null;

use crate::macros::{Field, Number, Struct, Version};

numbers! {
    /// The status that a call returns.
    ///
    /// 8 is `ncclTimeout` since 2.30. Before, it was only the count of results, `ncclNumResults`, and no function
    /// returned it. In no version does it mean success; nor does a number without a name.
    #[must_use = "only this status shows that a call of NCCL failed"]
    ncclResult_t {
        /// Done, or enqueued.
        ncclSuccess = 0;
        /// A call of CUDA failed.
        ncclUnhandledCudaError = 1;
        /// A call of the operating system failed.
        ncclSystemError = 2;
        /// An error inside of NCCL.
        ncclInternalError = 3;
        /// An argument has an invalid value.
        ncclInvalidArgument = 4;
        /// A call in a wrong order, or arguments that contradict each other.
        ncclInvalidUsage = 5;
        /// Another rank failed, or the network to it.
        ncclRemoteError = 6;
        /// Not done yet; ask again with `ncclCommGetAsyncError`.
        ncclInProgress = 7;
        /// The operation took too long.
        ncclTimeout = 8, since(2, 30, 3);
    }

    /// The dtype of elements: those that hsdp has.
    ncclDataType_t {
        /// f16.
        ncclFloat16 = 6;
        /// f32.
        ncclFloat32 = 7;
        /// bf16.
        ncclBfloat16 = 9;
    }

    /// A reduction: the one that hsdp uses.
    ncclRedOp_t {
        /// Sum.
        ncclSum = 0;
    }
}

constants! {
    /// Bytes of an `ncclUniqueId`.
    NCCL_UNIQUE_ID_BYTES: usize = 128;
    /// The value of an option that is left to NCCL.
    NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
    /// The second field of a struct of options, after its size. It had no name before.
    NCCL_API_MAGIC: c_uint = 0xcafe_beef, since(2, 29, 2);
}

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

pub(crate) const STRUCTS: &[Struct] = &[ncclUniqueId::STRUCT, ncclConfig_t::STRUCT];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_displays_as_its_name_or_as_itself() {
        assert_eq!(ncclResult_t::ncclSuccess.to_string(), "ncclSuccess");
        assert_eq!(ncclResult_t(8).to_string(), "ncclTimeout");
        assert_eq!(ncclResult_t(4711).to_string(), "4711");
        assert_eq!(ncclResult_t(-3).to_string(), "-3");
        assert_eq!(ncclDataType_t::ncclFloat16.to_string(), "ncclFloat16");
        assert_eq!(ncclRedOp_t(5).to_string(), "5");
    }

    #[test]
    fn only_zero_is_success() {
        let named =
            ncclResult_t::NUMBERS.iter().map(|number| number.value.try_into().expect("an int"));
        let successes: Vec<c_int> = named
            .chain([9, -1])
            .filter(|n| ncclResult_t(*n) == ncclResult_t::ncclSuccess)
            .collect();
        assert_eq!(successes, [0]);
    }

    #[test]
    fn a_number_has_the_size_and_alignment_of_an_int() {
        assert_eq!(size_of::<ncclDataType_t>(), size_of::<c_int>());
        assert_eq!(align_of::<ncclDataType_t>(), align_of::<c_int>());
    }

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
