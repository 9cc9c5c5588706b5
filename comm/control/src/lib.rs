//! The control plane of processes without MPI: they find each other, exchange small values by name, send each other
//! messages, and learn which ranks are late, have left or are lost. One process runs the coordinator ([`Server`]); every
//! process is a member ([`Membership`]).
//!
//! This crate knows no collective, no tensor and no device. A value or a message has at most 64 KiB. **It does not
//! encrypt.** Every message is authenticated with the job's [`Secret`], and every reader of the network can read it.
//!
//! | concept | in PyTorch | here |
//! |---|---|---|
//! | a place where processes find each other | `TCPStore` | [`Server`], [`Client`] |
//! | rank and members of the world | `rank`, `world_size` | [`Membership`], [`Member`] |
//! | a value by name, from all to all | `store.set`, `store.get`, `store.wait` | [`Membership::exchange`] |
//! | a value by name, from one to all | `store.set`, `store.get` | [`Membership::broadcast`] |
//! | a message from one member to another | `store.set`, `store.get` | [`Membership::pass`] |
//! | detection of lost members | (a timeout) | [`Membership::status`] |
//! | the variables that launchers set | `env://` | [`Bootstrap::from_env`] |
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//!
//! use hsdp_control::{Client, ClientOptions, Job, Rank, Secret, Server, ServerOptions, Terms};
//!
//! let job = Job::new("example", 1)?;
//! let secret = Secret::draw()?;
//! let terms = Terms::new(1)?; // a world of one rank
//! let server = Server::start(ServerOptions::new(job.clone(), secret.clone(), terms.clone()))?;
//!
//! let options = ClientOptions::new(server.address(), Rank::new(0), job, secret, terms);
//! let membership = Client::join(options)?;
//! assert_eq!(membership.exchange("greeting", b"hello")?, [b"hello".to_vec()]);
//! membership.leave()?;
//! server.finish(Duration::from_secs(5))?;
//! # Ok::<(), hsdp_control::ControlError>(())
//! ```
//!
//! # Modules
//!
//! All modules are private but [`wire`], which tests and fuzzers read. In reading order:
//!
//! - basic types: `error`, `limits`, `deadlines`, `job`, `secret`;
//! - messages: `wire` (their format, and gRPC), `proof` (their authentication);
//! - the coordinator: `coordinator` (its decisions, without I/O), `gate` (accepts connections), `room` (state that
//!   connections share), `visit` (one connection), `descriptors` (open files), `server`;
//! - a member: `client` (joining), `pauses` (between attempts), `line` (the connection), `status`, `membership`;
//! - `bootstrap` (the environment).
//!
//! `CONTROL.md` describes the protocol.

#![forbid(unsafe_code)]

mod bootstrap;
mod client;
mod coordinator;
mod deadlines;
mod descriptors;
mod error;
mod gate;
mod job;
mod limits;
mod line;
mod membership;
mod pauses;
mod proof;
mod room;
mod secret;
mod server;
mod status;
mod visit;
#[doc(hidden)]
pub mod wire;

pub use hsdp_sharding::Rank;

pub use self::bootstrap::{Bootstrap, Joined};
pub use self::client::{Client, ClientOptions};
pub use self::deadlines::Deadlines;
pub use self::error::{ControlError, Subject};
pub use self::job::{Job, Member, Terms};
pub use self::limits::{MOST_RANKS, MOST_VALUE};
pub use self::membership::Membership;
pub use self::secret::Secret;
pub use self::server::{Bind, Server, ServerOptions};
pub use self::status::{State, Status};
pub use self::wire::Loss;
