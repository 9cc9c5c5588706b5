//! Authentication: proofs that a side knows the secret, and MACs of all its messages after the handshake.
//!
//! CONTROL.md, "The handshake", says over which bytes they are computed, and why.

use hmac::{Hmac, KeyInit as _, Mac as _};
use prost::bytes::Bytes;
use sha2::Sha256;
use zeroize::Zeroizing;

use crate::wire::{Hello, Sealed, TAG};
use crate::{ControlError, Secret};

/// The side that proves, or sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Member,
    Coordinator,
}

impl Side {
    fn proof_label(self) -> &'static [u8] {
        match self {
            Self::Member => b"hsdp control: proof of a member",
            Self::Coordinator => b"hsdp control: proof of the coordinator",
        }
    }

    fn key_label(self) -> &'static [u8] {
        match self {
            Self::Member => b"hsdp control: seals of a member",
            Self::Coordinator => b"hsdp control: seals of the coordinator",
        }
    }
}

/// All that both sides sent before a proof.
#[derive(Clone, Debug)]
pub(crate) struct Transcript(Vec<u8>);

impl Transcript {
    pub(crate) fn new(hello: &Hello, nonce: &[u8]) -> Self {
        let Hello { protocol, job, start, rank, world, build, config, host, pid, nonce: first } =
            hello;
        let mut said = Self(Vec::new());
        said.add(&protocol.to_be_bytes());
        said.add(job.as_bytes());
        said.add(&start.to_be_bytes());
        said.add(&rank.to_be_bytes());
        said.add(&world.to_be_bytes());
        said.add(build.as_bytes());
        said.add(&config.to_be_bytes());
        said.add(host.as_bytes());
        said.add(&pid.to_be_bytes());
        said.add(first);
        said.add(nonce);
        said
    }

    /// Appends a part with its length in front, so that no two lists of parts give the same bytes.
    fn add(&mut self, part: &[u8]) {
        self.0.extend((part.len() as u64).to_be_bytes());
        self.0.extend(part);
    }

    /// The proof that `side` knows the secret.
    pub(crate) fn proof(&self, secret: &Secret, side: Side) -> Bytes {
        let mac = mac(secret.bytes(), &[side.proof_label(), &self.0]);
        Bytes::copy_from_slice(&mac.finalize().into_bytes())
    }

    /// Whether a proof is that of `side`. Compares in constant time.
    pub(crate) fn is_proved(&self, secret: &Secret, side: Side, proof: &[u8]) -> bool {
        mac(secret.bytes(), &[side.proof_label(), &self.0]).verify_slice(proof).is_ok()
    }

    /// The MACs of the messages of `side`.
    pub(crate) fn seals(&self, secret: &Secret, side: Side) -> Seals {
        let key = mac(secret.bytes(), &[side.key_label(), &self.0]).finalize().into_bytes();
        Seals { key: Zeroizing::new(key.into()), next: 0 }
    }
}

/// The MACs of one direction of one connection. Each is made once, and accepted once.
pub(crate) struct Seals {
    key: Zeroizing<[u8; TAG]>,
    next: u64,
}

impl Seals {
    /// The message with the next MAC.
    pub(crate) fn seal(&mut self, letter: Vec<u8>) -> Sealed {
        let seal = self.over_the_next(&letter).finalize().into_bytes();
        self.next += 1;
        Sealed { letter: letter.into(), seal: Bytes::copy_from_slice(&seal) }
    }

    /// The message, if it has the next MAC. Compares in constant time.
    pub(crate) fn open(&mut self, sealed: Sealed) -> Option<Bytes> {
        self.over_the_next(&sealed.letter).verify_slice(&sealed.seal).ok()?;
        self.next += 1;
        Some(sealed.letter)
    }

    fn over_the_next(&self, letter: &[u8]) -> Hmac<Sha256> {
        mac(self.key.as_slice(), &[&self.next.to_be_bytes(), letter])
    }
}

/// A random number that cannot be predicted.
pub(crate) fn nonce() -> Result<Bytes, ControlError> {
    let mut bytes = [0; TAG];
    getrandom::fill(&mut bytes).map_err(ControlError::system("draw a random number"))?;
    Ok(Bytes::copy_from_slice(&bytes))
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().fold(mac, |mac, part| mac.chain_update(part))
}

#[cfg(test)]
mod tests;
