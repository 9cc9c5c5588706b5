//! NCCL's enums: integers, since a library may return numbers that only a newer header names.
//!
//! Numbers that only count the others (`ncclNumResults`, `ncclNumTypes`, ...) move from version to version and are left out.

use std::fmt;
use std::os::raw::c_int;

use crate::declared::Number;

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

    /// The dtype of elements.
    ncclDataType_t {
        /// 8 bits, signed.
        ncclInt8 = 0;
        /// Another name of `ncclInt8`.
        ncclChar = 0;
        /// 8 bits, unsigned.
        ncclUint8 = 1;
        /// 32 bits, signed.
        ncclInt32 = 2;
        /// Another name of `ncclInt32`.
        ncclInt = 2;
        /// 32 bits, unsigned.
        ncclUint32 = 3;
        /// 64 bits, signed.
        ncclInt64 = 4;
        /// 64 bits, unsigned.
        ncclUint64 = 5;
        /// f16.
        ncclFloat16 = 6;
        /// Another name of `ncclFloat16`.
        ncclHalf = 6;
        /// f32.
        ncclFloat32 = 7;
        /// Another name of `ncclFloat32`.
        ncclFloat = 7;
        /// f64.
        ncclFloat64 = 8;
        /// Another name of `ncclFloat64`.
        ncclDouble = 8;
        /// bf16.
        ncclBfloat16 = 9;
        /// 8 bits, 4 of them exponent.
        ncclFloat8e4m3 = 10, since(2, 24, 3);
        /// 8 bits, 5 of them exponent.
        ncclFloat8e5m2 = 11, since(2, 24, 3);
    }

    /// A reduction. Numbers from 5 on are reductions that `ncclRedOpCreatePreMulSum` made.
    ncclRedOp_t {
        /// Sum.
        ncclSum = 0;
        /// Product.
        ncclProd = 1;
        /// Greatest.
        ncclMax = 2;
        /// Least.
        ncclMin = 3;
        /// Sum, divided by the number of ranks.
        ncclAvg = 4;
    }

    /// The location of the scalar of a reduction.
    ncclScalarResidence_t {
        /// In memory that the GPU reads while a collective runs.
        ncclScalarDevice = 0;
        /// In memory of the host, read before the call returns.
        ncclScalarHostImmediate = 1;
    }

    /// A statistic of a communicator's memory.
    ncclCommMemStat_t {
        /// Bytes that can be suspended.
        ncclStatGpuMemSuspend = 0, since(2, 29, 7);
        /// 1 while they are suspended, else 0.
        ncclStatGpuMemSuspended = 1, since(2, 29, 7);
        /// Bytes that cannot be suspended.
        ncclStatGpuMemPersist = 2, since(2, 29, 7);
        /// All bytes that NCCL counts.
        ncclStatGpuMemTotal = 3, since(2, 29, 7);
    }

    /// Values of the option `hostCftMode`.
    ncclHostCftMode_t {
        /// Left to NCCL.
        ncclHostCftDefault = c_int::MIN, since(2, 31, 2);
        /// On.
        ncclHostCftEnable = 1, since(2, 31, 2);
        /// Off.
        ncclHostCftDisable = 2, since(2, 31, 2);
        /// Only if nothing else works.
        ncclHostCftFallback = 3, since(2, 31, 2);
    }

    /// Values of the option `nvlsHostMode`. The values that disable a part may be combined.
    ncclNvlsHostMode_t {
        /// Left to NCCL.
        ncclNvlsHostModeDefault = c_int::MIN, since(2, 32, 3);
        /// On, wholly.
        ncclNvlsHostModeEnable = 0, since(2, 32, 3);
        /// Without the transport, and without registered buffers for it.
        ncclNvlsHostModeDisableTransport = 1, since(2, 32, 3);
        /// Without multimem in symmetric kernels and copy engines.
        ncclNvlsHostModeDisableSymmetricMultimem = 2, since(2, 32, 3);
        /// Off, wholly.
        ncclNvlsHostModeDisable = c_int::MAX, since(2, 32, 3);
    }

    /// The encryption of NCCL's data on TCP connections.
    ncclEncryptionMode_t {
        /// Not at all.
        NCCL_ENCRYPTION_MODE_NONE = 0, since(2, 32, 3);
        /// With a key that all ranks share.
        NCCL_ENCRYPTION_MODE_PSK = 1, since(2, 32, 3);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_displays_as_its_first_name_or_as_itself() {
        assert_eq!(ncclResult_t::ncclSuccess.to_string(), "ncclSuccess");
        assert_eq!(ncclResult_t(8).to_string(), "ncclTimeout");
        assert_eq!(ncclResult_t(4711).to_string(), "4711");
        assert_eq!(ncclResult_t(-3).to_string(), "-3");
        assert_eq!(ncclDataType_t::ncclChar.to_string(), "ncclInt8");
        assert_eq!(ncclRedOp_t(5).to_string(), "5");
    }

    #[test]
    fn only_zero_is_success() {
        let named = ncclResult_t::NUMBERS.iter().map(|number| number.value);
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
}
