//! The control plane of processes without MPI: they find each other, send each other messages, and
//! learn which ranks are silent, have left or are lost. One process runs the coordinator
//! ([`Server`]); every process is a member ([`Membership`]).
//!
//! This crate knows no collective, no tensor and no device. A message has at most 64 KiB. **It does
//! not encrypt.** Every message is authenticated with the job's [`Secret`], and every reader of the
//! network can read it.
//!
//! | concept | in PyTorch | here |
//! |---|---|---|
//! | a place where processes find each other | `TCPStore` | [`Server`], [`Membership::join`] |
//! | rank and size of the world | `rank`, `world_size` | [`Membership::rank`], [`Membership::size`] |
//! | a message from one member to another | `store.set`, `store.get` | [`Membership::pass`] |
//! | detection of lost members | (a timeout) | [`Membership::status`] |
//! | the variables that launchers set | `env://` | [`Bootstrap::from_env`] |
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//!
//! use hsdp_control::{Job, Membership, Options, Rank, Secret, Server, State, Terms};
//!
//! let job = Job { name: "example".to_owned(), start: 1 };
//! let options = Options::new(job, Secret::draw()?, Terms::new(1)); // a world of one rank
//! let server = Server::start(options.clone())?;
//!
//! let options = Options { address: server.address(), ..options };
//! let membership = Membership::join(Rank::new(0), options)?;
//! assert_eq!(membership.status().states, [State::Alive]);
//! membership.leave()?;
//! server.finish(Duration::from_secs(5))?;
//! # Ok::<(), hsdp_control::ControlError>(())
//! ```
//!
//! # Modules
//!
//! All modules are private but [`wire`], which tests and fuzzers read. A module imports only
//! modules before it. In reading order:
//!
//! - basic types: `limits`, `job`, `error`, `deadlines`, `secret`, `options`, `status` (the states
//!   of members);
//! - messages: `wire` (their format, and gRPC), `proof` (their authentication);
//! - the coordinator: `coordinator` (its decisions, without I/O), `server` (its thread) with
//!   `open_files` (their limit), `accept` (connections), `session` (one connection) and `members`
//!   (state that connections share);
//! - a member: `pauses` (between attempts), `connection`, `membership`, `join`;
//! - `bootstrap` (the environment).
//!
//! `CONTROL.md` describes the protocol.

#![forbid(unsafe_code)]

mod bootstrap;
mod connection;
mod coordinator;
mod deadlines;
mod error;
mod job;
mod join;
mod limits;
mod membership;
mod options;
mod pauses;
mod proof;
mod secret;
mod server;
mod status;
#[doc(hidden)]
pub mod wire;

pub use hsdp_sharding::Rank;
pub use prost::bytes::Bytes;

pub use self::bootstrap::{Bootstrap, Joined};
pub use self::deadlines::Deadlines;
pub use self::error::{
    ArgumentError, ConnectionError, ControlError, Ends, JoinError, RendezvousError, ServerError,
    Subject,
};
pub use self::job::{Job, Member, Terms};
pub use self::limits::{MOST_MESSAGE, MOST_RANKS};
pub use self::membership::Membership;
pub use self::options::Options;
pub use self::secret::Secret;
pub use self::server::Server;
pub use self::status::{Loss, Passed, State, Status};
