//! Messages and headers that may be anything.

#[path = "../../../tests/fuzz/corpus.rs"]
mod corpus;
mod inputs;

use hsdp_comm::fuzzing::{self, Header, MessageKind};
use hsdp_kernels::memory;

#[test]
fn a_message_that_may_be_anything_is_read_or_refused() {
    corpus::run("message", inputs::message);
}

#[test]
fn a_hello_that_may_be_anything_is_read_or_refused() {
    corpus::run("hello", inputs::hello);
}

#[test]
fn a_messages_header_that_may_be_anything_is_read_or_refused() {
    corpus::run("data", inputs::data);
}

#[test]
fn what_the_comparer_is_told_may_be_anything_and_is_read_or_refused() {
    corpus::run("compare", inputs::compare);
}

#[test]
fn a_last_state_that_may_be_anything_is_read_or_refused() {
    corpus::run("left", inputs::left);
}

#[test]
fn calls_of_nccl_that_may_be_anything_are_read_or_refused() {
    corpus::run("drain", inputs::drain);
}

#[test]
fn an_end_that_may_be_anything_is_read_or_refused() {
    corpus::run("end", inputs::end);
}

#[test]
fn an_exchange_that_may_be_anything_is_read_or_refused() {
    corpus::run("exchange", inputs::exchange);
}

#[test]
fn the_corpora_have_what_is_taken_and_what_is_refused() {
    let message = |input: &[u8]| fuzzing::read(&inputs::sealed(input)).is_ok();
    assert_eq!(corpus::taken("message", message), (12, 29));
    let said = |kind| move |input: &[u8]| Header::read(kind, input).is_ok();
    assert_eq!(corpus::taken("hello", said(MessageKind::Hello)), (6, 13));
    assert_eq!(corpus::taken("data", said(MessageKind::Data)), (8, 24));
    assert_eq!(corpus::taken("compare", said(MessageKind::Compare)), (9, 17));
    assert_eq!(corpus::taken("left", said(MessageKind::Left)), (5, 14));
    assert_eq!(corpus::taken("drain", said(MessageKind::Drain)), (5, 11));
    assert_eq!(corpus::taken("end", said(MessageKind::End)), (15, 22));
    assert_eq!(corpus::taken("exchange", said(MessageKind::Exchange)), (4, 9));
}

#[test]
fn memory_is_counted() {
    assert!(memory::allocations().count > 0, "the allocator counts");
}
