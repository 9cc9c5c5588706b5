//! A script in place of mpirun.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Copies a program by another process. A child of another test could hold a file that this process
/// has written open for writing while it is started.
pub(crate) fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status();
    assert!(copied.expect("it starts").success());
}

/// Makes this script the `mpirun` of a folder.
pub(crate) fn replace_mpirun(folder: &Path, script: &str) {
    let text = folder.join("text");
    fs::write(&text, script).expect("written");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).expect("set");
    copy_program(&text, &folder.join("mpirun"));
}
