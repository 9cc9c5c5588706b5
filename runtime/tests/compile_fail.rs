//! Code that must not compile: each case has the error that says why.
//!
//! Compilers differ in their words. The `.stderr` files have the words of the oldest supported compiler; any other need
//! only refuse the cases, in whatever words. To write the files for a new oldest compiler, run `TRYBUILD=overwrite
//! cargo test -p hsdp --test compile_fail`, and read the difference.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const CASES: &str = "tests/compile_fail";
/// The variable for the folder with copies of the cases, for a run of this test that compares no words.
const COPIES: &str = "HSDP_COMPILE_FAIL_COPIES";

#[test]
#[ignore = "trybuild compiles all libraries once more, for some 100 s"]
fn what_must_not_be_written_does_not_compile() {
    let copies = env::var_os(COPIES).map(PathBuf::from);
    if copies.is_some() || env::var_os("TRYBUILD").is_some() || compiler_has_our_words() {
        let folder = copies.unwrap_or_else(|| CASES.into());
        trybuild::TestCases::new().compile_fail(folder.join("*.rs"));
    } else {
        println!("this is not rustc {}: its errors are not compared", oldest());
        refuse_without_words();
    }
}

fn oldest() -> &'static str {
    env!("CARGO_PKG_RUST_VERSION")
}

fn compiler_has_our_words() -> bool {
    let compiler = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(compiler).arg("--version").output().expect("there is a compiler");
    String::from_utf8_lossy(&version.stdout).starts_with(&format!("rustc {}.", oldest()))
}

/// Runs this test again on copies of the cases, and lets trybuild write their errors there. The run still fails if a
/// case compiles. It is a process of its own, since trybuild reads a variable of the environment.
fn refuse_without_words() {
    let copies = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compile_fail");
    if copies.exists() {
        fs::remove_dir_all(&copies).expect("copies of an earlier run");
    }
    fs::create_dir_all(&copies).expect("a folder for copies");
    for case in fs::read_dir(CASES).expect("the cases") {
        let case = case.expect("a case");
        fs::copy(case.path(), copies.join(case.file_name())).expect("a copy");
    }
    let mut again = Command::new(env::current_exe().expect("this test has a path"));
    again.args(["--exact", "what_must_not_be_written_does_not_compile"]);
    again.args(["--ignored", "--nocapture"]);
    let status = again.env("TRYBUILD", "overwrite").env(COPIES, &copies).status();
    assert!(status.expect("this test runs again").success(), "a case compiles: see above");
}
