//! Handling of arbitrary inputs: the fuzzers call these functions, and `main.rs` runs them on the inputs that the
//! fuzzers have found.
//!
//! For any bytes the worst outcome is an error. A message that is accepted is within its bounds, and is the same when it
//! is written and read again.

use hsdp_control::wire::{Body, Frame, FrameKind, FromCoordinator, FromMember, TAG, WireMessage};
use hsdp_control::{Bytes, MOST_MESSAGE, State};
use prost::Message as _;

/// A frame, as a process without the secret may send it.
pub(crate) fn frame(input: &[u8]) {
    let Ok(frame) = Frame::decode(input) else { return };
    let Ok(kind) = frame.clone().checked() else { return };
    let again = Frame::decode(Frame::from(kind.clone()).encode_to_vec().as_slice());
    assert_eq!(again.expect("it was written"), frame);
    match kind {
        FrameKind::Hello(hello) => {
            assert!(hello.rank < hello.world && hello.world <= hsdp_control::MOST_RANKS);
            assert_eq!(hello.nonce.len(), TAG);
            is_short(&[&hello.job, &hello.build, &hello.host]);
        }
        FrameKind::Challenge(challenge) => {
            assert_eq!((challenge.nonce.len(), challenge.proof.len()), (TAG, TAG));
        }
        FrameKind::Proof(proof) => assert_eq!(proof.proof.len(), TAG),
        FrameKind::Refusal(refusal) => {
            is_short(&[&refusal.reason, refusal.job.as_deref().unwrap_or("")]);
        }
        FrameKind::Authenticated(signed) => assert_eq!(signed.mac.len(), TAG),
    }
}

/// A member's message, after the check of its MAC.
pub(crate) fn member(input: &[u8]) {
    if let Some(FromMember::Pass(to, body)) = read_twice(input) {
        assert!(to.is_sorted() && to.len() <= input.len() && body == Body::default());
    }
}

/// A message of the coordinator, after the check of its MAC.
pub(crate) fn coordinator(input: &[u8]) {
    match read_twice(input) {
        Some(FromCoordinator::Failed(error)) => assert!(!error.to_string().is_empty()),
        Some(FromCoordinator::Changed(_, State::Lost { why, .. })) => is_short(&[&why]),
        Some(FromCoordinator::Ended(why)) => is_short(&[&why]),
        _ => {}
    }
}

/// The message, if it is one; it is the same when it is written and read again. It takes a body only if it has one, and no longer one than
/// members may send.
fn read_twice<M: WireMessage + Clone + PartialEq + std::fmt::Debug>(input: &[u8]) -> Option<M> {
    let mut message = M::read(input, Body::default()).ok()?;
    let again = M::read(&message.write(), Body::default());
    assert_eq!(again.expect("it was written"), message);
    let has_body = message.body().is_some();
    for (len, fits) in [(1, has_body), (MOST_MESSAGE, has_body), (MOST_MESSAGE + 1, false)] {
        let body = Bytes::from_static(&LONG[..len]).into();
        assert_eq!(M::read(input, body).is_ok(), fits, "a body of {len} bytes");
    }
    Some(message)
}

static LONG: [u8; MOST_MESSAGE + 1] = [7; MOST_MESSAGE + 1];

fn is_short(texts: &[&str]) {
    assert!(texts.iter().all(|text| text.len() <= 256));
}
