//! NCCL's enums and macros. Enums are integers, since a library may return numbers that only a newer header names.
//!
//! An enum that functions return is declared as a whole, except for the number that counts the others (`ncclNumResults`), which
//! moves from version to version.

use std::fmt;
use std::os::raw::{c_int, c_uint};

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
    /// The color of a rank that joins no communicator of a split.
    NCCL_SPLIT_NOCOLOR: c_int = -1;
    /// The second field of a struct of options, after its size. It had no name before.
    NCCL_API_MAGIC: c_uint = 0xcafe_beef, since(2, 29, 2);
}

#[cfg(test)]
mod tests;
