//! Authentication: proofs that a side knows the secret, and MACs of all its messages after the handshake.
//!
//! CONTROL.md, "The handshake", says over which bytes they are computed, and why.

use std::error::Error as _;
use std::mem;

use hmac::{Hmac, KeyInit as _, Mac as _};
use prost::bytes::Bytes;
use sha2::Sha256;
use tonic::Status;
use zeroize::Zeroizing;

use crate::wire::{Authenticated, Body, Frame, FrameKind, Hello, Malformed, TAG, WireMessage};
use crate::{ControlError, Loss, Secret};

/// The side that proves, or sends: the labels of its proofs and of its keys.
pub(crate) struct Side {
    proof: &'static [u8],
    key: &'static [u8],
}

pub(crate) const MEMBER: Side =
    Side { proof: b"hsdp control: proof of a member", key: b"hsdp control: seals of a member" };

pub(crate) const COORDINATOR: Side = Side {
    proof: b"hsdp control: proof of the coordinator",
    key: b"hsdp control: seals of the coordinator",
};

/// All that both sides sent before a proof.
#[derive(Clone, Debug)]
pub(crate) struct Transcript(Vec<u8>);

impl Transcript {
    pub(crate) fn new(hello: &Hello, nonce: &[u8]) -> Self {
        let Hello { protocol, job, start, rank, world, build, config, host, pid, nonce: first } =
            hello;
        let mut transcript = Self(Vec::new());
        let parts: [&[u8]; 11] = [
            &protocol.to_be_bytes(),
            job.as_bytes(),
            &start.to_be_bytes(),
            &rank.to_be_bytes(),
            &world.to_be_bytes(),
            build.as_bytes(),
            &config.to_be_bytes(),
            host.as_bytes(),
            &pid.to_be_bytes(),
            first,
            nonce,
        ];
        parts.into_iter().for_each(|part| transcript.add(part));
        transcript
    }

    /// Appends a part with its length in front, so that no two lists of parts give the same bytes.
    fn add(&mut self, part: &[u8]) {
        self.0.extend((part.len() as u64).to_be_bytes());
        self.0.extend(part);
    }

    /// The proof that `side` knows the secret.
    pub(crate) fn proof(&self, secret: &Secret, side: &Side) -> Bytes {
        let mac = mac(secret.bytes(), &[side.proof, &self.0]);
        Bytes::copy_from_slice(&mac.finalize().into_bytes())
    }

    /// Whether a proof is that of `side`. Compares in constant time.
    pub(crate) fn is_proved(&self, secret: &Secret, side: &Side, proof: &[u8]) -> bool {
        mac(secret.bytes(), &[side.proof, &self.0]).verify_slice(proof).is_ok()
    }

    /// The MACs of the messages of `side`.
    pub(crate) fn macs(&self, secret: &Secret, side: &Side) -> Macs {
        let key = mac(secret.bytes(), &[side.key, &self.0]).finalize().into_bytes();
        Macs { key: Zeroizing::new(key.into()), next: 0 }
    }
}

/// The MACs of one direction of one connection. Each is made once, and accepted once.
pub(crate) struct Macs {
    key: Zeroizing<[u8; TAG]>,
    next: u64,
}

impl Macs {
    /// The frame of a message, with the next MAC.
    pub(crate) fn frame(&mut self, mut message: impl WireMessage) -> Frame {
        let body = message.body().map(mem::take).unwrap_or_default();
        FrameKind::Authenticated(self.sign(message.write(), body)).into()
    }

    /// The next message, from the result of a read; or the loss that the read shows, in words, too. Bytes that cannot be decoded have
    /// no MAC, so they count as forged.
    pub(crate) fn receive<M: WireMessage>(
        &mut self,
        read: Result<Option<Frame>, Status>,
    ) -> Result<M, (Loss, String)> {
        let forged = || (Loss::Forged, M::FORGED.to_owned());
        let frame = match read {
            Ok(Some(frame)) => frame,
            // A status with a source is an error of HTTP/2 or of the system. Any other status is about the bytes themselves.
            Err(status) if status.source().is_none() => return Err(forged()),
            Ok(None) | Err(_) => return Err((Loss::Ended, M::ENDED.to_owned())),
        };
        let Ok(FrameKind::Authenticated(signed)) = frame.checked() else { return Err(forged()) };
        let (message, body) = self.verify(signed).ok_or_else(forged)?;
        M::read(&message, body)
            .map_err(|Malformed(problem)| (Loss::Invalid, format!("{}: {problem}", M::INVALID)))
    }

    fn sign(&mut self, message: Vec<u8>, Body { bytes, digest }: Body) -> Authenticated {
        let mac = self.over_the_next(&message, &digest).finalize().into_bytes();
        self.next += 1;
        Authenticated { message: message.into(), body: bytes, mac: Bytes::copy_from_slice(&mac) }
    }

    /// The message and its body, if they have the next MAC. Compares in constant time.
    fn verify(&mut self, signed: Authenticated) -> Option<(Bytes, Body)> {
        let body = Body::from(signed.body);
        self.over_the_next(&signed.message, &body.digest).verify_slice(&signed.mac).ok()?;
        self.next += 1;
        Some((signed.message, body))
    }

    fn over_the_next(&self, message: &[u8], digest: &[u8; TAG]) -> Hmac<Sha256> {
        mac(self.key.as_slice(), &[&self.next.to_be_bytes(), digest, message])
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
