//! Sequences, without a run.

use hsdp::Rank;
use hsdp_models::data::{Data, Tokens, Windows};
use hsdp_models::decoder::Pretrained;
use hsdp_train::Place as Microbatch;

use super::place::Place;

#[test]
fn sequences_without_tokens_are_refused() {
    let text = || Tokens::characters(&"she sells sea shells ".repeat(20));
    let refused = |context| {
        let data = Data::of_text(text(), Windows { batch: 2, context, seed: 1 });
        data.expect_err("no such sequences").to_string()
    };
    assert_eq!(refused(0), "a context of 0 has no tokens: it must be at least 1");
    let most = refused(usize::MAX);
    assert!(most.starts_with("the text has 420 characters: a context of "), "{most}");
}

/// Returns the sequences of a microbatch in step 0 of a file for four ranks with two microbatches.
fn microbatch(rank: usize, microbatch: usize) -> Vec<u32> {
    let place = Place::new();
    let from = Pretrained::open(&place.path("model")).expect("a model");
    let file = place.path("batches.safetensors");
    let data = Data::read_batches(&file, from.config(), 4, 2).expect("batches");
    data.microbatch(Microbatch { step: 0, microbatch, rank: Rank::new(rank) }).tokens
}

#[test]
fn the_last_microbatch_of_a_step_is_the_last_rank_s() {
    assert_eq!(microbatch(3, 1).len(), 3 * 32);
}

#[test]
#[should_panic(expected = "rank 4 has no microbatch 0 in step 0: 4 ranks have 2 microbatches each")]
fn a_rank_beyond_those_of_the_file_has_no_sequences() {
    microbatch(4, 0);
}

#[test]
#[should_panic(expected = "rank 0 has no microbatch 2 in step 0")]
fn a_microbatch_beyond_those_of_the_file_has_no_sequences() {
    microbatch(0, 2);
}
