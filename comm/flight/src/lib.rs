//! The operations of hsdp's ranks in words, and their flight recorder: the last operations of each rank, and what the records of all
//! ranks say together.
//!
//! The crate issues nothing and waits for nothing: hsdp-comm describes each operation, and writes it into the ring of its rank.
//!
//! | concept | type |
//! | --- | --- |
//! | a description of an operation, which its members compare | [`Descriptor`], of [`Op`], [`Channel`], [`Tag`] and the like |
//! | a rank's last operations, written while it runs | [`Recorder`] |
//! | a copy of them, as JSON or in a file | [`FlightRecord`] |
//! | what the records of all ranks say together | [`explain`], [`Explanation`] |
//!
//! ```
//! use hsdp_flight::{Channel, Finding, FlightRecord, Origin, Recorder, explain};
//! use hsdp_sharding::Rank;
//!
//! let recorder = Recorder::new(1024, Origin::now());
//! let record = recorder.record(Rank::new(0), 1);
//! let read = FlightRecord::from_json(&record.to_json())?;
//! assert_eq!(explain(&[read]).finding, Finding::Nothing);
//! # Ok::<(), hsdp_flight::FlightError>(())
//! ```
//!
//! In reading order: `op`, `tag`, `descriptor`; `ring` (written while ranks run); `record` (a copy of a
//! ring, as text and in a file); `explain`. FLIGHT.md beside the sources has the rules of the ring.

#![forbid(unsafe_code)]

#[macro_use]
mod op;

mod descriptor;
mod explain;
mod record;
mod ring;
mod tag;

pub use self::descriptor::{Counts, Descriptor, GroupId};
pub use self::explain::{
    Explanation, Finding, LastIssued, Lateness, MemberFinding, OftenLast, Presence, WorldEnd,
    explain,
};
pub use self::op::{Channel, Op, Reduction};
pub use self::record::{FlightEntry, FlightError, FlightGroup, FlightRecord, FlightState};
pub use self::ring::{Ending, EntryNumber, Origin, Recorder};
pub use self::tag::{ModelLabel, ModelName, Part, PartKind, Stage, Tag};
