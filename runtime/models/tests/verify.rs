//! Runs the tests that `train_gpt` has among its parts: cargo builds an example, and does not test it.

#![expect(clippy::disallowed_macros, reason = "the program has a subscriber")]

#[path = "../examples/train_gpt/main.rs"]
#[expect(dead_code, reason = "the functions that only `main` calls")]
mod train_gpt;
