//! Handling of arbitrary inputs: the fuzzers call these functions, and `main.rs` runs them on the inputs that the
//! fuzzers have found.
//!
//! For any bytes the worst outcome is an error. A message that is accepted is within its bounds, and is the same when it
//! is written and read again.

use hsdp_control::MOST_MESSAGE;
use hsdp_control::wire::{Frame, FromCoordinator, FromMember, Kind, Message, TAG};
use prost::Message as _;

/// A frame, as a process without the secret may send it.
pub(crate) fn frame(input: &[u8]) {
    let Ok(frame) = Frame::decode(input) else { return };
    let Ok(kind) = frame.clone().checked() else { return };
    let again = Frame::decode(Frame::from(kind.clone()).encode_to_vec().as_slice());
    assert_eq!(again.expect("it was written"), frame);
    match kind {
        Kind::Hello(hello) => {
            assert!(hello.rank < hello.world && hello.world <= hsdp_control::MOST_RANKS);
            assert_eq!(hello.nonce.len(), TAG);
            is_short(&[&hello.job, &hello.build, &hello.host]);
        }
        Kind::Challenge(challenge) => {
            assert_eq!((challenge.nonce.len(), challenge.proof.len()), (TAG, TAG));
        }
        Kind::Proof(proof) => assert_eq!(proof.proof.len(), TAG),
        Kind::Refusal(refusal) => {
            is_short(&[&refusal.reason, refusal.job.as_deref().unwrap_or("")]);
        }
        Kind::Authenticated(signed) => assert_eq!(signed.mac.len(), TAG),
    }
}

/// A member's message, after the check of its MAC.
pub(crate) fn member(input: &[u8]) {
    match read_twice(input) {
        Some(FromMember::Pass(pass)) => assert!(pass.payload.len() <= MOST_MESSAGE),
        Some(FromMember::Beat(()) | FromMember::Goodbye(()) | FromMember::Quit(_)) | None => {}
    }
}

/// A message of the coordinator, after the check of its MAC.
pub(crate) fn coordinator(input: &[u8]) {
    match read_twice(input) {
        Some(FromCoordinator::Failed(failure)) => {
            let error = failure.error().expect("it was within its bounds");
            assert!(!error.to_string().is_empty());
        }
        Some(FromCoordinator::Passed(pass)) => assert!(pass.payload.len() <= MOST_MESSAGE),
        Some(FromCoordinator::Changed(changed)) => is_short(&[&changed.why]),
        Some(FromCoordinator::Ended(why)) => is_short(&[&why]),
        _ => {}
    }
}

/// The message, if it is one; it is the same when it is written and read again.
fn read_twice<M: Message + Clone + PartialEq + std::fmt::Debug>(input: &[u8]) -> Option<M> {
    let message = M::read(input).ok()?;
    assert_eq!(M::read(&message.clone().write()).expect("it was written"), message);
    Some(message)
}

fn is_short(texts: &[&str]) {
    assert!(texts.iter().all(|text| text.len() <= 256));
}
