//! Untrusted manifests and headers.

#[path = "../../../../tests/fuzz/corpus.rs"]
mod corpus;
mod inputs;

use safetensors::SafeTensors;

#[test]
fn a_manifest_that_may_be_anything_is_read_or_refused() {
    corpus::run("manifest", inputs::manifest);
}

#[test]
fn a_file_of_safetensors_that_may_be_anything_is_read_or_refused() {
    corpus::run("header", inputs::header);
}

#[test]
fn the_corpus_has_what_is_taken_and_what_is_refused() {
    let header = |input: &[u8]| SafeTensors::deserialize(input).is_ok();
    assert_eq!(corpus::taken("header", header), (7, 17));
}
