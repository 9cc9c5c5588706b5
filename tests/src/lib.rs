//! Tests across the crates, and the conformance runner.

pub mod conformance;
pub mod golden;
pub mod soak;
pub mod support;

/// The programs of the pages that users read: `cargo test` compiles and runs them.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../README.md")]
    struct Readme;

    #[doc = include_str!("../../docs/guide.md")]
    struct Guide;

    #[doc = include_str!("../../docs/faults.md")]
    struct Faults;

    #[cfg(feature = "mpi")]
    #[doc = include_str!("../../docs/clusters.md")]
    struct Clusters;
}
