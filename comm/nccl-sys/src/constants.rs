//! The macros of `nccl.h` that define constants.

use std::os::raw::{c_int, c_uint};

use crate::declared::Constant;

constants! {
    /// Bytes of an `ncclUniqueId`.
    NCCL_UNIQUE_ID_BYTES: usize = 128;
    /// The value of an option that is left to NCCL.
    NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
    /// The color of a rank that joins no communicator of a split.
    NCCL_SPLIT_NOCOLOR: c_int = -1;
    /// A time that is not known.
    NCCL_UNDEF_FLOAT: f32 = -1.0, since(2, 22, 3);
    /// The second field of a struct of options, after its size. It had no name before.
    NCCL_API_MAGIC: c_uint = 0xcafe_beef, since(2, 29, 2);
    /// A window whose ranks may pass different offsets into it.
    NCCL_WIN_DEFAULT: c_int = 0x00, since(2, 27, 3);
    /// A window whose ranks always pass the same offset into it.
    NCCL_WIN_COLL_SYMMETRIC: c_int = 0x01, since(2, 27, 3);
    /// A window whose operations keep their order over InfiniBand.
    NCCL_WIN_STRICT_ORDERING: c_int = 0x02, since(2, 29, 7);
    /// A window for GIN only, communication that the GPU itself initiates.
    NCCL_WIN_GIN_ONLY: c_int = 0x04, since(2, 32, 3);
    /// A window for counted CFT only.
    NCCL_WIN_CFT_COUNTED: c_int = 0x08, since(2, 32, 3);
    /// The alignment of the address of a window, in bytes.
    NCCL_WIN_REQUIRED_ALIGNMENT: usize = 4096, since(2, 28, 3);
    /// As many blocks of a GPU as give the highest speed.
    NCCL_CTA_POLICY_DEFAULT: c_int = 0x00, since(2, 27, 3);
    /// Fewer blocks of a GPU, which leaves room for concurrent kernels.
    NCCL_CTA_POLICY_EFFICIENCY: c_int = 0x01, since(2, 27, 3);
    /// No blocks of a GPU, where its copy engines can do the work.
    NCCL_CTA_POLICY_ZERO: c_int = 0x02, since(2, 28, 3);
    /// Operations on the parent of a smaller communicator go on.
    NCCL_SHRINK_DEFAULT: c_int = 0x00, since(2, 27, 3);
    /// Operations that still run on the parent are ended first.
    NCCL_SHRINK_ABORT: c_int = 0x01, since(2, 27, 3);
    /// The only flag of a revocation.
    NCCL_REVOKE_DEFAULT: c_int = 0x00, since(2, 28, 7);
    /// A suspension releases memory.
    NCCL_SUSPEND_MEM: c_int = 0x01, since(2, 29, 7);
}
