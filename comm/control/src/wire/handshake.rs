//! What is said before anybody has proved who he is. It looks like this in every version of the protocol.

use prost::bytes::Bytes;

use super::{Malformed, string, tag};
use crate::limits::MOST_RANKS;

/// Who a member says it is.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hello {
    /// Its version of the protocol.
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// The name of its job.
    #[prost(string, tag = "2")]
    pub job: String,
    /// The number of the job's start.
    #[prost(fixed64, tag = "3")]
    pub start: u64,
    /// Its rank.
    #[prost(uint32, tag = "4")]
    pub rank: u32,
    /// Ranks in its world.
    #[prost(uint32, tag = "5")]
    pub world: u32,
    /// Its build.
    #[prost(string, tag = "6")]
    pub build: String,
    /// The digest of its configuration.
    #[prost(fixed64, tag = "7")]
    pub config: u64,
    /// Its host's name.
    #[prost(string, tag = "8")]
    pub host: String,
    /// Its process.
    #[prost(uint32, tag = "9")]
    pub pid: u32,
    /// Drawn for this handshake.
    #[prost(bytes = "bytes", tag = "10")]
    pub nonce: Bytes,
}

impl Hello {
    pub(crate) fn check(&self) -> Result<(), Malformed> {
        string(&self.job, "a job's name that is too long")?;
        string(&self.build, "a build that is too long")?;
        string(&self.host, "a host's name that is too long")?;
        tag(&self.nonce, "a nonce that is none")?;
        if self.world > MOST_RANKS || self.rank >= self.world {
            return Err(Malformed("a rank that is not in its world"));
        }
        Ok(())
    }
}

/// The coordinator's answer: that it knows the secret, and what a member has to prove the same with.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Challenge {
    /// Drawn for this handshake.
    #[prost(bytes = "bytes", tag = "1")]
    pub nonce: Bytes,
    /// Over everything said so far, the nonce with it.
    #[prost(bytes = "bytes", tag = "2")]
    pub proof: Bytes,
}

impl Challenge {
    pub(crate) fn check(&self) -> Result<(), Malformed> {
        tag(&self.nonce, "a nonce that is none")?;
        tag(&self.proof, "a proof that is none")
    }
}

/// That a member knows the secret.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Proof {
    /// Over everything said so far.
    #[prost(bytes = "bytes", tag = "1")]
    pub proof: Bytes,
}

/// Why a stranger has to go.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Refusal {
    /// In words.
    #[prost(string, tag = "1")]
    pub reason: String,
    /// The job that is served, if that is why.
    #[prost(string, optional, tag = "2")]
    pub job: Option<String>,
    /// The number of its start.
    #[prost(fixed64, tag = "3")]
    pub start: u64,
}

impl Refusal {
    pub(crate) fn check(&self) -> Result<(), Malformed> {
        string(&self.reason, "a reason that is too long")?;
        string(self.job.as_deref().unwrap_or(""), "a job's name that is too long")
    }
}
