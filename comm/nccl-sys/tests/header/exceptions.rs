//! Names of `nccl.h` that this crate does not declare.

const COUNT: &str = "it counts the other names and moves from version to version";
const NULL: &str = "it is null, for which Rust has a name";
const ITSELF: &str = "it is the header's own version";

/// Names, each with the reason why it is not declared.
pub(crate) const EXCEPTIONS: &[(&str, &str)] = &[
    ("ncclNumResults", COUNT),
    ("ncclNumTypes", COUNT),
    ("ncclNumOps", COUNT),
    ("ncclNumOps_dummy", COUNT),
    ("ncclMaxRedOp", "it says how large the enum is, which is an int here"),
    ("NCCL_CONFIG_UNDEF_PTR", NULL),
    ("NCCL_COMM_NULL", NULL),
    ("NCCL_MAJOR", ITSELF),
    ("NCCL_MINOR", ITSELF),
    ("NCCL_PATCH", ITSELF),
    ("NCCL_SUFFIX", ITSELF),
    ("NCCL_VERSION_CODE", ITSELF),
    ("NCCL_H_", "it keeps the header from being read twice"),
    (
        "ncclConfigExt_t",
        "options of vendors, which NVIDIA's library ignores: pointers to it are null",
    ),
    (
        "ncclResetDebugInit",
        "deprecated, and \"not supported as part of the NCCL API\" by the header itself",
    ),
];
