//! Failures of a rendezvous. The coordinator sends them, and members turn them into errors.

use std::time::Duration;

use hsdp_sharding::Rank;

use super::{Malformed, rank, string};
use crate::{ControlError, Member, Subject};

/// The failure of a rendezvous, or the reason why one member cannot join.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Failure {
    /// The cause.
    #[prost(oneof = "Cause", tags = "1, 2, 3")]
    pub cause: Option<Cause>,
}

/// The causes of a failure.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Cause {
    /// Ranks have not joined the rendezvous.
    #[prost(message, tag = "1")]
    Incomplete(Incomplete),
    /// Another process has the rank.
    #[prost(message, tag = "2")]
    DuplicateRank(DuplicateRank),
    /// A rank differs in a setting that all ranks must share.
    #[prost(message, tag = "3")]
    ConfigMismatch(ConfigMismatch),
}

/// Ranks have not joined the rendezvous.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Incomplete {
    /// The deadline, in milliseconds.
    #[prost(uint64, tag = "1")]
    pub after: u64,
    /// The ranks that are missing.
    #[prost(uint32, repeated, tag = "2")]
    pub missing: Vec<u32>,
    /// The ranks that joined.
    #[prost(uint32, repeated, tag = "3")]
    pub came: Vec<u32>,
}

/// Another process has the rank.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DuplicateRank {
    /// The process that has the rank.
    #[prost(message, optional, tag = "1")]
    pub first: Option<Member>,
    /// The process that is refused.
    #[prost(message, optional, tag = "2")]
    pub second: Option<Member>,
}

/// A rank differs in a setting that all ranks must share.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigMismatch {
    /// The setting.
    #[prost(enumeration = "Subject", tag = "1")]
    pub what: i32,
    /// The rank that differs.
    #[prost(message, optional, tag = "2")]
    pub member: Option<Member>,
    /// Its value.
    #[prost(string, tag = "3")]
    pub found: String,
    /// The value of the coordinator.
    #[prost(string, tag = "4")]
    pub expected: String,
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self { cause: Some(cause) }
    }
}

impl Failure {
    /// The failure as an error.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    pub fn error(&self) -> Result<ControlError, Malformed> {
        Ok(match self.cause.clone().ok_or(Malformed("no failure"))? {
            Cause::Incomplete(Incomplete { after, missing, came }) => ControlError::Incomplete {
                after: Duration::from_millis(after),
                missing: ranks(missing)?,
                came: ranks(came)?,
            },
            Cause::DuplicateRank(DuplicateRank { first, second }) => {
                ControlError::DuplicateRank { first: member(first)?, second: member(second)? }
            }
            Cause::ConfigMismatch(ConfigMismatch { what, member: one, found, expected }) => {
                let what = Subject::try_from(what);
                let what = what.map_err(|_| Malformed("an unknown difference"))?;
                string(&found, "a text that is too long")?;
                string(&expected, "a text that is too long")?;
                ControlError::ConfigMismatch { what, member: member(one)?, found, expected }
            }
        })
    }
}

fn ranks(numbers: Vec<u32>) -> Result<Vec<Rank>, Malformed> {
    numbers.iter().try_for_each(|&number| rank(number))?;
    Ok(numbers.into_iter().map(|number| Rank::new(number as usize)).collect())
}

fn member(member: Option<Member>) -> Result<Member, Malformed> {
    let member = member.ok_or(Malformed("no member"))?;
    rank(member.rank)?;
    string(&member.host, "a host's name that is too long")?;
    let address: Result<std::net::SocketAddr, _> = member.from.parse();
    address.map_err(|_| Malformed("an invalid address"))?;
    Ok(member)
}
