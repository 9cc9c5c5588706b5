//! Ranks that share no memory: each has a world of its own, in which the messages of the others stand for these. `REMOTE.md`,
//! beside the sources of this crate, describes the messages, their order, and why results are those of threads.
//!
//! In reading order: `buffer`, `message`, `header` (messages), `transport`, `wires` (the ways that they travel), `hello` (the first comparison), `transmit` (the
//! data of each call), `mailbox`, `tree`, `exchanges`, `batch`, `relay` (exchanges), `drain`, `ending`, `alive`, `comparer`,
//! `outgoing`, `progress`,
//! `endpoint` (all of them together). `fuzzing` is for tests.

// Jobs of MPI, and the control plane with NCCL, use parts of it.
#![cfg_attr(not(all(feature = "mpi", feature = "nccl")), allow(dead_code, unused_imports))]

mod alive;
mod batch;
mod buffer;
mod comparer;
mod drain;
mod ending;
mod endpoint;
mod exchanges;
pub mod fuzzing;
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
mod wires;

pub(crate) use self::buffer::{BLOCK_BYTES, Buffer, BufferPool};
pub(crate) use self::comparer::{Urgency, find_difference};
pub(crate) use self::drain::{ALL_EPOCHS, CallNumber, CallShape, Calls, DeviceCall};
pub(crate) use self::endpoint::{Endpoint, EndpointRequest};
pub(crate) use self::header::{DataHeader, bytes as header_bytes};
pub(crate) use self::hello::Asked;
pub(crate) use self::mailbox::Open;
pub(crate) use self::message::{MessageKind, RankMessage};
pub(crate) use self::transmit::{DataMessage, DataMessages, form_of};
pub(crate) use self::transport::{
    Answer, Cause, PeerLoss, Transport, TransportError, Waker, copied,
};
pub(crate) use self::wires::wires;
