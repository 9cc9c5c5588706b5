//! Tests that need a process of their own: they take the device's memory, or count it.

use std::env;
use std::process::Command;

/// Told to that process.
const CHILD: &str = "HSDP_GPU_TEST_CHILD";

/// Runs a test again in a process of its own, by its path in this program, where this is not that
/// process. Whether it is.
///
/// # Panics
/// If the test fails there.
pub(super) fn is_apart(path: &str) -> bool {
    if env::var_os(CHILD).is_some() {
        return true;
    }
    // Of an emulated driver: memory that is freed holds up the operations that are issued later, as
    // on a card. Beside other tests it would hold up theirs.
    run_alone(path, "HSDP_EMULATED_FENCES", "1");
    false
}

/// Runs a test in a process of its own, with a variable of its environment.
///
/// # Panics
/// If the test fails there.
pub(super) fn run_alone(path: &str, variable: &str, value: &str) {
    let mut child = Command::new(env::current_exe().expect("this program"));
    child.args(["--exact", path, "--ignored", "--nocapture"]);
    let ended = child.env(CHILD, "1").env(variable, value).output().expect("it starts");
    let said = [ended.stdout, ended.stderr].map(|all| String::from_utf8_lossy(&all).into_owned());
    let said = said.concat();
    assert!(ended.status.success() && said.contains("1 passed"), "{}: {said}", ended.status);
}
