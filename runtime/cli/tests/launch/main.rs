//! `hsdp launch`: what ranks get, what is shown and kept, and how a job ends.
#![cfg(unix)]

#[path = "../program/mod.rs"]
mod program;

mod ends;
mod job;
mod mpi;
mod output;
mod ranks;
mod refusals;
mod signals;
