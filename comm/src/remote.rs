//! Ranks that share no memory: each has a world of its own, in which the others are stood in for by what they send. `REMOTE.md`,
//! beside the sources of this crate, says what is sent, when, and why results are those of threads.
//!
//! In reading order: `buffer`, `letter`, `payload`, `statement` (what is sent), `transport`, `wires` (what carries it), `hello` (what is compared first), `transmit`, `elements`,
//! `units` (what travels of which operation), `execution` (one operation), `desk`, `line`, `tree`, `exchanges`, `batch`, `relay` (exchanges), `ending`, `alive`, `probes`,
//! `outgoing`, `courier`,
//! `office` (all of them together). `fuzzing` is for tests.

mod alive;
mod batch;
mod buffer;
mod courier;
mod desk;
mod elements;
mod ending;
mod exchanges;
mod execution;
pub(crate) mod fuzzing;
mod hello;
mod letter;
mod line;
mod office;
mod outgoing;
mod payload;
mod probes;
mod relay;
mod statement;
mod transmit;
mod transport;
mod tree;
mod units;
mod wires;

#[cfg(feature = "mpi")]
pub(crate) use self::buffer::BLOCK_BYTES;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::buffer::{Buffer, Shelf};

pub(crate) use self::execution::Execution;
pub(crate) use self::hello::Asked;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::letter::Letter;
pub(crate) use self::office::Office;
pub(crate) use self::transmit::Transmit;
pub(crate) use self::transmit::{At, Next, Parcels};
pub(crate) use self::transport::Transport;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::transport::TransportError;
#[cfg(feature = "nccl")]
pub(crate) use self::transport::{Answer, Cause, Loss};

/// Transports between the threads of one process, by rank.
pub(crate) fn wires(size: usize) -> Vec<Box<dyn Transport>> {
    let boxed = |wires| Box::new(wires) as Box<dyn Transport>;
    wires::Wires::between(size).into_iter().map(boxed).collect()
}
