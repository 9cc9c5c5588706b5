//! The example as a program: a folder of transformers in, another out, and its refusals.

#[path = "../common/mod.rs"]
mod common;
mod data;
#[cfg(unix)]
mod ends;
mod export;
mod families;
mod place;
mod refusals;
mod training;
