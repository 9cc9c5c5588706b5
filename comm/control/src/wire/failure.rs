//! Failures of a rendezvous or a round. The coordinator sends them, and members turn them into errors.

use std::net::SocketAddr;
use std::time::Duration;

use hsdp_sharding::Rank;

use super::letter::Present;
use super::{Malformed, string};
use crate::limits::MOST_RANKS;
use crate::{ControlError, Member, Subject};

/// A failure, the same for all members.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Failure {
    /// The kind of failure.
    #[prost(oneof = "Grounds", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub grounds: Option<Grounds>,
}

/// The kinds of failure.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Grounds {
    /// Ranks have not joined the rendezvous.
    #[prost(message, tag = "1")]
    Incomplete(Incompleteness),
    /// Another process has the rank.
    #[prost(message, tag = "2")]
    Occupied(Occupied),
    /// A rank differs in a setting that all ranks must share.
    #[prost(message, tag = "3")]
    Different(Difference),
    /// Ranks have not joined a round.
    #[prost(message, tag = "4")]
    Late(Lateness),
    /// Ranks are lost or have left.
    #[prost(message, tag = "5")]
    Absent(Absence),
    /// Some ranks exchange, and some broadcast.
    #[prost(message, tag = "6")]
    Mixed(Mixture),
    /// No rank, or several, gave the value of a broadcast.
    #[prost(message, tag = "7")]
    Givers(Givers),
    /// Too many rounds.
    #[prost(message, tag = "8")]
    Crowded(Overflow),
}

/// Ranks have not joined the rendezvous.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Incompleteness {
    #[prost(uint64, tag = "1")]
    pub(crate) after: u64,
    #[prost(uint32, repeated, tag = "2")]
    pub(crate) missing: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    pub(crate) came: Vec<u32>,
}

/// Another process has the rank.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Occupied {
    #[prost(message, optional, tag = "1")]
    pub(crate) first: Option<Present>,
    #[prost(message, optional, tag = "2")]
    pub(crate) second: Option<Present>,
}

/// A rank differs in a setting that all ranks must share.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Difference {
    #[prost(uint32, tag = "1")]
    pub(crate) what: u32,
    #[prost(message, optional, tag = "2")]
    pub(crate) member: Option<Present>,
    #[prost(string, tag = "3")]
    pub(crate) found: String,
    #[prost(string, tag = "4")]
    pub(crate) expected: String,
}

/// Ranks have not joined a round.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Lateness {
    #[prost(uint64, tag = "1")]
    pub(crate) after: u64,
    #[prost(uint32, repeated, tag = "2")]
    pub(crate) missing: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    pub(crate) came: Vec<u32>,
}

/// Ranks are lost or have left.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Absence {
    #[prost(uint32, repeated, tag = "1")]
    pub(crate) lost: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub(crate) finished: Vec<u32>,
}

/// Some ranks exchange, and some broadcast.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mixture {
    #[prost(uint32, repeated, tag = "1")]
    pub(crate) exchange: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub(crate) broadcast: Vec<u32>,
}

/// No rank, or several, gave the value of a broadcast.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Givers {
    #[prost(uint32, repeated, tag = "1")]
    pub(crate) ranks: Vec<u32>,
}

/// Too many rounds.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Overflow {
    #[prost(uint32, tag = "1")]
    pub(crate) most: u32,
}

impl From<Grounds> for Failure {
    fn from(grounds: Grounds) -> Self {
        Self { grounds: Some(grounds) }
    }
}

impl Failure {
    pub(crate) fn check(&self) -> Result<(), Malformed> {
        self.error("").map(drop)
    }

    /// The failure as an error; `key` is that of the round.
    ///
    /// # Errors
    /// [`Malformed`] if it is unknown or out of bounds.
    pub fn error(&self, key: &str) -> Result<ControlError, Malformed> {
        let key = key.to_owned();
        Ok(match self.grounds.as_ref().ok_or(Malformed("no failure"))? {
            Grounds::Incomplete(Incompleteness { after, missing, came }) => {
                let after = Duration::from_millis(*after);
                ControlError::Incomplete { after, missing: ranks(missing)?, came: ranks(came)? }
            }
            Grounds::Occupied(Occupied { first, second }) => {
                let (first, second) = (member(first.as_ref())?, member(second.as_ref())?);
                ControlError::DuplicateRank { first, second }
            }
            Grounds::Different(difference) => different(difference)?,
            Grounds::Late(Lateness { after, missing, came }) => {
                let after = Duration::from_millis(*after);
                ControlError::Late { key, after, missing: ranks(missing)?, came: ranks(came)? }
            }
            Grounds::Absent(Absence { lost, finished }) => {
                ControlError::Absent { key, lost: ranks(lost)?, finished: ranks(finished)? }
            }
            Grounds::Mixed(Mixture { exchange, broadcast }) => {
                let (exchange, broadcast) = (ranks(exchange)?, ranks(broadcast)?);
                ControlError::MixedRound { key, exchange, broadcast }
            }
            Grounds::Givers(Givers { ranks: givers }) => {
                ControlError::Givers { key, givers: ranks(givers)? }
            }
            Grounds::Crowded(Overflow { most }) => {
                ControlError::Crowded { key, most: *most as usize }
            }
        })
    }
}

fn different(difference: &Difference) -> Result<ControlError, Malformed> {
    let what = match difference.what {
        0 => Subject::Protocol,
        1 => Subject::WorldSize,
        2 => Subject::Build,
        3 => Subject::Config,
        _ => return Err(Malformed("an unknown difference")),
    };
    string(&difference.found, "a text that is too long")?;
    string(&difference.expected, "a text that is too long")?;
    let Difference { found, expected, .. } = difference.clone();
    Ok(ControlError::ConfigMismatch {
        what,
        member: member(difference.member.as_ref())?,
        found,
        expected,
    })
}

fn ranks(numbers: &[u32]) -> Result<Vec<Rank>, Malformed> {
    if numbers.iter().any(|&number| number >= MOST_RANKS) {
        return Err(Malformed("a rank that no world has"));
    }
    Ok(numbers.iter().map(|&number| Rank::new(number as usize)).collect())
}

fn member(present: Option<&Present>) -> Result<Member, Malformed> {
    present.ok_or(Malformed("no member"))?.try_into()
}

impl TryFrom<&Present> for Member {
    type Error = Malformed;

    fn try_from(present: &Present) -> Result<Self, Malformed> {
        string(&present.host, "a host's name that is too long")?;
        let from: Result<SocketAddr, _> = present.from.parse();
        let from = from.map_err(|_| Malformed("an invalid address"))?;
        let rank = ranks(&[present.rank])?[0];
        Ok(Self { rank, host: present.host.as_str().into(), pid: present.pid, from })
    }
}

impl From<&Member> for Present {
    fn from(member: &Member) -> Self {
        let Member { rank, host, pid, from } = member;
        Self { rank: rank.get(), host: host.to_string(), pid: *pid, from: from.to_string() }
    }
}
