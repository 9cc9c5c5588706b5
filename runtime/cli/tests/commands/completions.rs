//! `hsdp completions`: its scripts are valid, and contain the commands.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::folder::Folder;
use crate::program::hsdp;

/// Returns the error of a shell that reads a script without running it. Returns `None` if there is
/// no error, or the shell is not installed.
fn complaint(shell: &str, script: &str) -> Option<String> {
    let child = Command::new(shell)
        .arg("-n")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        writeln!(std::io::stderr(), "skipped: {shell} is not installed").expect("written");
        return None;
    };
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(script.as_bytes()).expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success() || !told.is_empty()).then_some(told)
}

#[test]
fn scripts_are_read_by_their_shells_and_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, script, told) = hsdp(&["completions", shell]);
        assert_eq!((code, &*told), (Some(0), ""), "{shell}");
        for word in ["checkpoint", "reshard", "plan", "check", "launch", "completions"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        assert!(!script.contains("launch-rank"), "{shell}");
        assert_eq!(complaint(shell, &script), None, "{shell}");
    }
}

#[test]
fn other_shells_are_refused_in_one_line() {
    let told = Folder::new().refused(&["completions", "csh"]);
    let expected = "hsdp: invalid value 'csh' for '<SHELL>' \
                    [possible values: bash, elvish, fish, powershell, zsh]";
    assert_eq!(told, expected);
}
