//! Numbers of `nccl.h` that this crate does not declare, in enums that functions return.

/// Names, each with the reason why it is not declared.
pub(crate) const EXCEPTIONS: &[(&str, &str)] =
    &[("ncclNumResults", "it counts the other names and moves from version to version")];
