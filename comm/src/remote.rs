//! Ranks that share no memory: each has a world of its own, in which the others are stood in for by what they send. `REMOTE.md`,
//! beside the sources of this crate, says what is sent, when, and why results are those of threads.
//!
//! In reading order: `buffer`, `message`, `header` (what is sent), `transport`, `wires` (what carries it), `hello` (what is compared first), `transmit`, `elements`,
//! `units` (what travels of which operation), `mailbox`, `tree`, `exchanges`, `batch`, `relay` (exchanges), `drain`, `ending`, `alive`, `comparer`,
//! `outgoing`, `progress`,
//! `endpoint` (all of them together). `fuzzing` is for tests.

mod alive;
mod batch;
mod buffer;
mod comparer;
mod drain;
mod elements;
mod ending;
mod endpoint;
mod exchanges;
pub(crate) mod fuzzing;
mod header;
mod hello;
mod mailbox;
mod message;
mod outgoing;
mod progress;
mod relay;
mod transmit;
mod transport;
mod tree;
mod units;
mod wires;

#[cfg(feature = "mpi")]
pub(crate) use self::buffer::BLOCK_BYTES;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::buffer::{Buffer, Pool};

pub(crate) use self::comparer::{Urgency, find_difference};
#[cfg(feature = "nccl")]
pub(crate) use self::drain::{ALL_EPOCHS, Calls, DeviceCall, Place, Wire};
pub(crate) use self::endpoint::{Endpoint, Request};
pub(crate) use self::header::{DataHeader, data_header_bytes};
pub(crate) use self::hello::Asked;
pub(crate) use self::mailbox::Receiver;
pub(crate) use self::message::{Kind, Message};
pub(crate) use self::transmit::{At, DataMessage, DataMessages, Next, Transmit};
pub(crate) use self::transport::Transport;
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::transport::TransportError;
#[cfg(feature = "nccl")]
pub(crate) use self::transport::{Answer, Arrivals, Cause, Loss, Losses, Waker};

/// Transports between the threads of one process, by rank.
pub(crate) fn wires(size: usize) -> Vec<Box<dyn Transport>> {
    let boxed = |wires| Box::new(wires) as Box<dyn Transport>;
    wires::Wires::between(size).into_iter().map(boxed).collect()
}
