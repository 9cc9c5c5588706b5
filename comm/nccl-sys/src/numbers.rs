//! NCCL's enums and macros. Enums are integers, since a library may return numbers that only a newer header names.
//!
//! An enum that functions return is declared as a whole, except for the number that counts the others (`ncclNumResults`), which
//! moves from version to version.

use std::fmt;
use std::os::raw::{c_int, c_uint};

use crate::declare::Number;

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
}
