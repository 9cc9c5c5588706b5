//! The inputs of hsdp-checkpoint with whatever the fuzzer thinks of: of the target that the
//! variable `HSDP_FUZZ` names.

#![no_main]

use std::env;
use std::sync::LazyLock;

#[path = "../../../../runtime/checkpoint/tests/fuzz/inputs.rs"]
#[allow(dead_code)]
mod inputs;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| match env::var("HSDP_FUZZ").as_deref() {
    Ok("header") => inputs::header,
    Ok("manifest") => inputs::manifest,
    other => panic!("HSDP_FUZZ is {other:?}, no target of hsdp-checkpoint"),
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| TARGET(input));
