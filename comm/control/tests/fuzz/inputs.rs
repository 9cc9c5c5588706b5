//! Handling of arbitrary inputs: the fuzzers call these functions, and `main.rs` runs them on the inputs that the
//! fuzzers have found.
//!
//! For any bytes the worst outcome is an error. A message that is accepted is within its bounds, and is the same when it
//! is written and read again.

use hsdp_control::MOST_VALUE;
use hsdp_control::wire::{
    CoordinatorLetter, Frame, FromCoordinator, FromMember, Kind, MemberLetter, TAG,
};
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
        Kind::Sealed(sealed) => assert_eq!(sealed.seal.len(), TAG),
    }
}

/// A member's message, after the check of its MAC.
pub(crate) fn member(input: &[u8]) {
    let Ok(says) = MemberLetter::read(input) else { return };
    let again = MemberLetter { says: Some(says.clone()) }.encode_to_vec();
    assert_eq!(MemberLetter::read(&again).expect("it was written"), says);
    match says {
        FromMember::Give(give) => {
            is_short(&[&give.key]);
            assert!(give.value.is_none_or(|value| value.len() <= MOST_VALUE));
        }
        FromMember::Abort(abort) => is_short(&[&abort.reason]),
        FromMember::Pass(pass) => assert!(pass.what.len() <= MOST_VALUE),
        FromMember::Beat(()) | FromMember::Goodbye(()) | FromMember::Quit(_) => {}
    }
}

/// A message of the coordinator, after the check of its MAC.
pub(crate) fn coordinator(input: &[u8]) {
    let Ok(says) = CoordinatorLetter::read(input) else { return };
    let again = CoordinatorLetter { says: Some(says.clone()) }.encode_to_vec();
    assert_eq!(CoordinatorLetter::read(&again).expect("it was written"), says);
    let failure = match says {
        FromCoordinator::Failed(failure) => Some(failure),
        FromCoordinator::RoundFailed(failed) => failed.failure,
        FromCoordinator::Value(value) => {
            is_short(&[&value.key]);
            assert!(value.value.len() <= MOST_VALUE);
            None
        }
        FromCoordinator::Passed(pass) => {
            assert!(pass.what.len() <= MOST_VALUE);
            None
        }
        _ => None,
    };
    if let Some(failure) = failure {
        let error = failure.error("key").expect("it was within its bounds");
        assert!(!error.to_string().is_empty());
    }
}

fn is_short(texts: &[&str]) {
    assert!(texts.iter().all(|text| text.len() <= 256));
}
