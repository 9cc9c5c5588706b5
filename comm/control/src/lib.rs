//! The control plane of processes that have no MPI: they find each other, pass small values around by name, and are told
//! who is late, who has left and who is gone. One process runs the [`Server`], every process is a [`Membership`].
//!
//! It knows no collective, no tensor and no device: a value, and what members pass to each other, has at most 64 KiB. **It does not
//! encrypt.** Every message is authenticated with the job's [`Secret`], and readable by whoever can read the network.
//!
//! | concept | in PyTorch | here |
//! |---|---|---|
//! | where processes find each other | `TCPStore` | [`Server`], [`Client`] |
//! | who is there | `rank`, `world_size` | [`Membership`], [`Member`] |
//! | a value by name, from all to all | `store.set`, `store.get`, `store.wait` | [`Membership::exchange`] |
//! | the same, from one to all | `store.set`, `store.get` | [`Membership::broadcast`] |
//! | something from one to another | `store.set`, `store.get` | [`Membership::pass`] |
//! | who is gone | (a timeout) | [`Membership::status`] |
//! | what launchers set | `env://` | [`Bootstrap::from_env`] |
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
//! All are private but [`wire`], which tests and fuzzers read; their items are named here. In reading order: `error`, `limits`, `deadlines`, `job`, `secret`
//! (words); `wire` (messages, and gRPC), `proof` (who says them); `coordinator` (what is decided, without any I/O), `gate` (connections),
//! `room` (what they share), `visit` (one of them), `descriptors` (what they take), `server`; `client` (joining), `pauses`, `line` (the member's connection), `status`, `membership`; `bootstrap` (the environment).
//! `CONTROL.md` is the protocol.

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
