//! The flight recorder: what each rank issued last, and what a set of such records says. PROTOCOL.md, "Flight recorder".
//!
//! In reading order: `ending` and `ring` (written while ranks run), `record` (a copy of it), `json` (as text), `dump` (in a file),
//! `explain` (what the records of all ranks say together).

mod dump;
mod ending;
mod explain;
mod json;
mod record;
mod ring;

pub(crate) use self::dump::Dump;
pub(crate) use self::ending::Ending;
pub use self::explain::{
    Explanation, Finding, LastIssued, Lateness, MemberFinding, OftenLast, Presence, WorldEnd,
    explain,
};
pub use self::json::FlightError;
pub use self::record::{FlightEntry, FlightGroup, FlightRecord, FlightState};
pub(crate) use self::ring::{EntryNumber, Origin, Recorder};
