//! Arbitrary bytes as frames and messages.

#[path = "../../../../tests/fuzz/corpus.rs"]
mod corpus;
mod inputs;

use hsdp_control::wire::{Body, Frame, FromCoordinator, FromMember, WireMessage as _};
use prost::Message as _;

#[test]
fn a_frame_that_may_be_anything_is_read_or_refused() {
    corpus::run("frame", inputs::frame);
}

#[test]
fn a_members_message_that_may_be_anything_is_read_or_refused() {
    corpus::run("member", inputs::member);
}

#[test]
fn a_coordinators_message_that_may_be_anything_is_read_or_refused() {
    corpus::run("coordinator", inputs::coordinator);
}

#[test]
fn the_corpora_have_what_is_taken_and_what_is_refused() {
    let frame = |input: &[u8]| Frame::decode(input).is_ok_and(|frame| frame.checked().is_ok());
    assert_eq!(corpus::taken("frame", frame), (8, 18));
    let member = |input: &[u8]| FromMember::read(input, Body::default()).is_ok();
    assert_eq!(corpus::taken("member", member), (7, 15));
    let coordinator = |input: &[u8]| FromCoordinator::read(input, Body::default()).is_ok();
    assert_eq!(corpus::taken("coordinator", coordinator), (14, 30));
}
