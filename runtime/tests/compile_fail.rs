//! What must not compile, each with the error that says why.
//!
//! After a change of compiler that words its errors differently: `TRYBUILD=overwrite cargo test -p hsdp --test compile_fail`,
//! and read the difference.

#[test]
fn what_must_not_be_written_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/*.rs");
}
