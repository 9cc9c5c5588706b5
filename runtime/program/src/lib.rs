//! The conventions that hsdp's programs share: `hsdp`, the examples and the conformance runner.
//!
//! Input is bounded in memory and time. Bad input is one line on stderr and exit code 2.
