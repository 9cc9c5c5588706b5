//! `inputs::compare` with whatever the fuzzer thinks of.

#![no_main]

#[path = "../../../../comm/tests/fuzz/inputs.rs"]
#[allow(dead_code)]
mod inputs;

libfuzzer_sys::fuzz_target!(|input: &[u8]| inputs::compare(input));
