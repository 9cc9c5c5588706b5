//! The built program.

use std::process::Command;

/// Exit code, stdout and stderr.
pub(crate) type Said = (Option<i32>, String, String);

/// Runs `hsdp` with these arguments.
pub(crate) fn hsdp(arguments: &[&str]) -> Said {
    output(Command::new(env!("CARGO_BIN_EXE_hsdp")).args(arguments))
}

/// Runs a command to its end.
pub(crate) fn output(command: &mut Command) -> Said {
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}
