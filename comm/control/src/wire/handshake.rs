//! The frames of the handshake, before authentication. Their format is the same in every version of the protocol.

use prost::bytes::Bytes;

use super::{Malformed, string, tag};
use crate::limits::MOST_RANKS;

/// The identity that a member claims.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hello {
    /// The version of the protocol.
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
    /// Its process id.
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
        tag(&self.nonce, "a nonce of the wrong length")?;
        if self.world > MOST_RANKS || self.rank >= self.world {
            return Err(Malformed("a rank that is not in its world"));
        }
        Ok(())
    }
}

/// The coordinator's answer: a proof that it knows the secret, and a nonce for the member's proof.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Challenge {
    /// Drawn for this handshake.
    #[prost(bytes = "bytes", tag = "1")]
    pub nonce: Bytes,
    /// The proof over all that was sent so far, with this nonce.
    #[prost(bytes = "bytes", tag = "2")]
    pub proof: Bytes,
}

impl Challenge {
    pub(crate) fn check(&self) -> Result<(), Malformed> {
        tag(&self.nonce, "a nonce of the wrong length")?;
        tag(&self.proof, "a proof of the wrong length")
    }
}

/// The proof that a member knows the secret.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Proof {
    /// The proof over all that was sent so far.
    #[prost(bytes = "bytes", tag = "1")]
    pub proof: Bytes,
}

/// The reason why a connection is refused.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Refusal {
    /// The reason, in words.
    #[prost(string, tag = "1")]
    pub reason: String,
    /// The job that is served, if the member belongs to another one.
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
