//! The inputs of hsdp-comm with whatever the fuzzer thinks of: of the target that the variable
//! `HSDP_FUZZ` names.

#![no_main]

use std::env;
use std::sync::LazyLock;

#[path = "../../../../comm/tests/fuzz/inputs.rs"]
#[allow(dead_code)]
mod inputs;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| match env::var("HSDP_FUZZ").as_deref() {
    Ok("compare") => inputs::compare,
    Ok("data") => inputs::data,
    Ok("drain") => inputs::drain,
    Ok("end") => inputs::end,
    Ok("exchange") => inputs::exchange,
    Ok("hello") => inputs::hello,
    Ok("left") => inputs::left,
    Ok("message") => inputs::message,
    other => panic!("HSDP_FUZZ is {other:?}, no target of hsdp-comm"),
});

libfuzzer_sys::fuzz_target!(|input: &[u8]| TARGET(input));
