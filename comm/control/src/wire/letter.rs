//! What members and their coordinator tell each other, under seal.

use prost::Message as _;
use prost::bytes::Bytes;

use super::{Failure, Malformed, string, value};
use crate::limits::MOST_RANKS;

/// A letter of a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MemberLetter {
    /// What it says.
    #[prost(oneof = "FromMember", tags = "1, 2, 3, 4, 5")]
    pub says: Option<FromMember>,
}

/// What a member says.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FromMember {
    /// That it is there.
    #[prost(message, tag = "1")]
    Beat(()),
    /// Its part in a round.
    #[prost(message, tag = "2")]
    Give(Give),
    /// That the job is over.
    #[prost(message, tag = "3")]
    Abort(Abort),
    /// That it has done its part.
    #[prost(message, tag = "4")]
    Goodbye(()),
    /// Something for another member.
    #[prost(message, tag = "5")]
    Pass(Pass),
}

/// A member's part in a round.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Give {
    /// Which round.
    #[prost(string, tag = "1")]
    pub key: String,
    /// What the member takes it for.
    #[prost(enumeration = "RoundKind", tag = "2")]
    pub kind: i32,
    /// What it brings.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub value: Option<Bytes>,
}

/// What a round is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum RoundKind {
    /// Everybody gives, everybody gets everything.
    Exchange = 0,
    /// One gives, everybody gets that.
    Broadcast = 1,
}

/// What one member passes to another.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Pass {
    /// To whom it goes; when it is passed on, from whom it comes.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// What it is.
    #[prost(bytes = "bytes", tag = "2")]
    pub what: Bytes,
}

/// The end of the job, by a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Abort {
    /// Why.
    #[prost(string, tag = "1")]
    pub reason: String,
}

/// A letter of the coordinator.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CoordinatorLetter {
    /// What it says.
    #[prost(oneof = "FromCoordinator", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11")]
    pub says: Option<FromCoordinator>,
}

/// What the coordinator says.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FromCoordinator {
    /// That it is there.
    #[prost(message, tag = "1")]
    Beat(()),
    /// A member of the world.
    #[prost(message, tag = "2")]
    Present(Present),
    /// That all are there.
    #[prost(message, tag = "3")]
    Welcome(Welcome),
    /// That there will be no world, or none with the one who reads this.
    #[prost(message, tag = "4")]
    Failed(Failure),
    /// What a member gave.
    #[prost(message, tag = "5")]
    Value(Value),
    /// That a round has failed.
    #[prost(message, tag = "6")]
    RoundFailed(RoundFailed),
    /// What has become of a member.
    #[prost(message, tag = "7")]
    Changed(Changed),
    /// That the job is over.
    #[prost(message, tag = "8")]
    Aborted(Aborted),
    /// That a goodbye was heard.
    #[prost(message, tag = "9")]
    Farewell(()),
    /// That the one who reads this is a member no more.
    #[prost(message, tag = "10")]
    Ended(Ended),
    /// Something of another member.
    #[prost(message, tag = "11")]
    Passed(Pass),
}

/// A member of the world.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Present {
    /// Its rank.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// Its host.
    #[prost(string, tag = "2")]
    pub host: String,
    /// Its process.
    #[prost(uint32, tag = "3")]
    pub pid: u32,
    /// From where it has come: an address and a port.
    #[prost(string, tag = "4")]
    pub from: String,
}

/// The intervals that hold for all.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Welcome {
    /// Milliseconds between two beats.
    #[prost(uint32, tag = "1")]
    pub beat: u32,
    /// Beats that may be missed before a member is suspected.
    #[prost(uint32, tag = "2")]
    pub suspect: u32,
    /// Beats that may be missed before a member is lost.
    #[prost(uint32, tag = "3")]
    pub lost: u32,
    /// Milliseconds of a round.
    #[prost(uint32, tag = "4")]
    pub round: u32,
}

/// What a member gave.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// In which round.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Who.
    #[prost(uint32, tag = "2")]
    pub rank: u32,
    /// What.
    #[prost(bytes = "bytes", tag = "3")]
    pub value: Bytes,
}

/// A round has failed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RoundFailed {
    /// Which.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Why.
    #[prost(message, optional, tag = "2")]
    pub failure: Option<Failure>,
}

/// What has become of a member.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Changed {
    /// Which.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// What it is now.
    #[prost(enumeration = "Standing", tag = "2")]
    pub standing: i32,
    /// Why, if it is lost.
    #[prost(string, tag = "3")]
    pub why: String,
}

/// What a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Standing {
    /// It is heard.
    Alive = 0,
    /// It is silent.
    Suspect = 1,
    /// It has said goodbye.
    Finished = 2,
    /// It is gone.
    Lost = 3,
}

/// The job is over.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Aborted {
    /// By whose doing.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// Why.
    #[prost(string, tag = "2")]
    pub reason: String,
}

/// A member is one no more.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ended {
    /// Why.
    #[prost(string, tag = "1")]
    pub why: String,
}

impl MemberLetter {
    /// What a member says, within its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is nothing known, or out of bounds.
    pub fn read(bytes: &[u8]) -> Result<FromMember, Malformed> {
        let letter = Self::decode(bytes).map_err(|_| Malformed("a letter that is none"))?;
        let says = letter.says.ok_or(Malformed("an empty letter"))?;
        match &says {
            FromMember::Beat(()) | FromMember::Goodbye(()) => {}
            FromMember::Give(give) => {
                string(&give.key, "a key that is too long")?;
                RoundKind::try_from(give.kind).map_err(|_| Malformed("an unknown kind"))?;
                value(give.value.as_deref().unwrap_or_default())?;
            }
            FromMember::Abort(abort) => string(&abort.reason, "a reason that is too long")?,
            FromMember::Pass(pass) => pass.check()?,
        }
        Ok(says)
    }
}

impl CoordinatorLetter {
    /// What the coordinator says, within its bounds.
    ///
    /// # Errors
    /// [`Malformed`] if it is nothing known, or out of bounds.
    pub fn read(bytes: &[u8]) -> Result<FromCoordinator, Malformed> {
        let letter = Self::decode(bytes).map_err(|_| Malformed("a letter that is none"))?;
        let says = letter.says.ok_or(Malformed("an empty letter"))?;
        says.check()?;
        Ok(says)
    }
}

impl FromCoordinator {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            Self::Beat(()) | Self::Farewell(()) => Ok(()),
            Self::Present(present) => {
                rank(present.rank)?;
                string(&present.host, "a host's name that is too long")
            }
            Self::Welcome(Welcome { beat: 0, .. }) => Err(Malformed("no time between beats")),
            Self::Welcome(welcome) if welcome.lost > 1_000_000 || welcome.suspect > 1_000_000 => {
                Err(Malformed("an interval that is too long"))
            }
            Self::Welcome(_) => Ok(()),
            Self::Failed(failure) => failure.check(),
            Self::Value(given) => {
                rank(given.rank)?;
                string(&given.key, "a key that is too long")?;
                value(&given.value)
            }
            Self::RoundFailed(failed) => {
                string(&failed.key, "a key that is too long")?;
                failed.failure.as_ref().ok_or(Malformed("no failure"))?.check()
            }
            Self::Changed(changed) => {
                rank(changed.rank)?;
                Standing::try_from(changed.standing).map_err(|_| Malformed("an unknown state"))?;
                string(&changed.why, "a reason that is too long")
            }
            Self::Aborted(aborted) => {
                rank(aborted.rank)?;
                string(&aborted.reason, "a reason that is too long")
            }
            Self::Ended(ended) => string(&ended.why, "a reason that is too long"),
            Self::Passed(pass) => pass.check(),
        }
    }

    /// Whether nothing comes after it.
    pub(crate) fn is_last(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Farewell(()) | Self::Ended(_))
    }
}

impl Pass {
    fn check(&self) -> Result<(), Malformed> {
        rank(self.rank)?;
        value(&self.what)
    }
}

fn rank(rank: u32) -> Result<(), Malformed> {
    if rank < MOST_RANKS { Ok(()) } else { Err(Malformed("a rank that no world has")) }
}
