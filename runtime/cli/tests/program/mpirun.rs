//! A script in place of mpirun.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Makes this script the `mpirun` of a folder.
pub(crate) fn replace_mpirun(folder: &Path, script: &str) {
    let text = folder.join("text");
    fs::write(&text, script).expect("written");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).expect("set");
    // By another process: a child of another test could hold the file open for writing while it is started.
    let copied = Command::new("cp").arg(&text).arg(folder.join("mpirun")).status();
    assert!(copied.expect("it starts").success());
}
