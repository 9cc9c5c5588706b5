//! Ranks that share no memory: each has a world of its own, in which the others are stood in for by what they send. `REMOTE.md`,
//! beside the sources of this crate, says what is sent, when, and why results are those of threads.
//!
//! In reading order: `buffer`, `letter`, `statement` (what is sent), `transport`, `wires` (what carries it), `hello` (what is compared first), `travels`, `exchange`,
//! `passing`, `units` (what travels of which operation), `unpack`, `journey` (one operation), `desk`, `line`, `ending`, `alive`, `probes`, `outgoing`, `courier`,
//! `office` (all of them together). `fuzzing` is for tests.

mod alive;
mod buffer;
mod courier;
mod desk;
mod ending;
mod exchange;
pub(crate) mod fuzzing;
mod hello;
mod journey;
mod letter;
mod line;
mod office;
mod outgoing;
mod passing;
mod probes;
mod statement;
mod transport;
mod travels;
mod units;
mod unpack;
mod wires;

#[cfg(feature = "mpi")]
pub(crate) use self::buffer::BLOCK_BYTES;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::buffer::{Buffer, Shelf};

pub(crate) use self::hello::Asked;
pub(crate) use self::journey::Journey;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::letter::Letter;
pub(crate) use self::office::Office;
pub(crate) use self::transport::Transport;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::transport::TransportError;
#[cfg(feature = "nccl")]
pub(crate) use self::transport::{Answer, Cause, Loss};
pub(crate) use self::travels::Travels;
pub(crate) use self::{
    statement::Form,
    travels::{At, Parcels, Turn},
    units::digest,
};

/// Transports between the threads of one process, by rank.
pub(crate) fn wires(size: usize) -> Vec<Box<dyn Transport>> {
    let boxed = |wires| Box::new(wires) as Box<dyn Transport>;
    wires::Wires::between(size).into_iter().map(boxed).collect()
}
