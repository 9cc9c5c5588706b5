//! The commands of `hsdp`, except `launch`: their numbers beside the library's, their exact output,
//! and their errors, which are one line.

mod bounds;
mod calibrate;
mod check;
mod checkpoints;
mod completions;
mod decoders;
mod doctor;
mod folder;
mod mpirun;
mod outputs;
mod plan;
mod program;
mod simulate;
mod trace;
