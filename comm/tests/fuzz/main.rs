//! Letters and statements that may be anything.

#[path = "../../../tests/fuzz/corpus.rs"]
mod corpus;
mod inputs;

use hsdp_comm::fuzzing::{Kind, Letter, Statement};
use hsdp_kernels::memory;

#[test]
fn a_letter_that_may_be_anything_is_read_or_refused() {
    corpus::run("letter", inputs::letter);
}

#[test]
fn a_hello_that_may_be_anything_is_read_or_refused() {
    corpus::run("hello", inputs::hello);
}

#[test]
fn a_parcels_statement_that_may_be_anything_is_read_or_refused() {
    corpus::run("parcel", inputs::parcel);
}

#[test]
fn a_probe_that_may_be_anything_is_read_or_refused() {
    corpus::run("probe", inputs::probe);
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
    let letter = |input: &[u8]| Letter::read(&inputs::sealed(input)).is_ok();
    assert_eq!(corpus::taken("letter", letter), (10, 27));
    let said = |kind| move |input: &[u8]| Statement::read(kind, input).is_ok();
    assert_eq!(corpus::taken("hello", said(Kind::Hello)), (6, 13));
    assert_eq!(corpus::taken("parcel", said(Kind::Parcel)), (7, 21));
    assert_eq!(corpus::taken("probe", said(Kind::Probe)), (7, 12));
    assert_eq!(corpus::taken("end", said(Kind::End)), (14, 21));
    assert_eq!(corpus::taken("exchange", said(Kind::Exchange)), (4, 9));
}

#[test]
fn memory_is_counted() {
    assert!(memory::is_installed());
}
