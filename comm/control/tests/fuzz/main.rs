//! Arbitrary bytes as frames and messages.

#[path = "../../../../tests/fuzz/corpus.rs"]
mod corpus;
mod inputs;

use hsdp_control::wire::{CoordinatorLetter, Frame, MemberLetter};
use prost::Message as _;

#[test]
fn a_frame_that_may_be_anything_is_read_or_refused() {
    corpus::run("frame", inputs::frame);
}

#[test]
fn a_members_letter_that_may_be_anything_is_read_or_refused() {
    corpus::run("member", inputs::member);
}

#[test]
fn a_coordinators_letter_that_may_be_anything_is_read_or_refused() {
    corpus::run("coordinator", inputs::coordinator);
}

#[test]
fn the_corpora_have_what_is_taken_and_what_is_refused() {
    let frame = |input: &[u8]| Frame::decode(input).is_ok_and(|frame| frame.checked().is_ok());
    assert_eq!(corpus::taken("frame", frame), (7, 16));
    let member = |input: &[u8]| MemberLetter::read(input).is_ok();
    assert_eq!(corpus::taken("member", member), (9, 15));
    let coordinator = |input: &[u8]| CoordinatorLetter::read(input).is_ok();
    assert_eq!(corpus::taken("coordinator", coordinator), (20, 30));
}
