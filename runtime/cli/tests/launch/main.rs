//! `hsdp launch`: the environment of ranks, their output and logs, and the end of a job.

#[path = "../commands/mpirun.rs"]
mod mpirun;
#[path = "../commands/program.rs"]
mod program;

mod claims;
mod ends;
mod job;
mod mpi;
mod output;
mod ranks;
mod refusals;
mod signals;
mod stands_still;
