//! Tools for tests of training programs: faults that a rank commits on purpose, channels that are as slow as a network, and
//! threads that share no memory.
//!
//! All of them are options of [`WorldOptions`](crate::WorldOptions), so a test runs the code that a real run does.
//!
//! ```
//! use hsdp::prelude::*;
//! use hsdp::testing::{Fault, FaultKind};
//! use hsdp::{
//!     AbortReason, Channel, CommError, FlightRecord, Group, Pending, Rank, RankFailure, Stage, Tag,
//!     WorldError, explain, launch,
//! };
//!
//! let fault = Fault::at(Rank::new(1), 0, Stage::User, FaultKind::Leave);
//! let options = WorldOptions { faults: vec![fault], ..WorldOptions::default() };
//! let ends = launch(2, options, |world| {
//!     let all_ranks: Group = world.world_group(Channel::User);
//!     let ended = all_ranks.barrier(Tag::default()).and_then(Pending::wait);
//!     Ok::<_, RankFailure>((ended.expect_err("rank 1 leaves"), world.flight_record()))
//! });
//! let ends = ends.into_iter().map(|end| end.expect("no panic"));
//! let (errors, records): (Vec<CommError>, Vec<FlightRecord>) = ends.unzip();
//! let CommError::World(WorldError::Aborted { rank, reason, .. }) = &errors[0] else {
//!     unreachable!()
//! };
//! assert!(rank.index() == 1 && matches!(reason, AbortReason::Left { .. }));
//! assert!(explain(&records).to_string().contains("rank 1"));
//! ```

pub use hsdp_comm::{Between, Fault, FaultKind, FaultPlace, SlowChannel};
