use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use super::*;

fn hex(secret: &Secret) -> String {
    secret.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn digits_are_the_bytes() {
    let secret =
        Secret::from_bytes(std::array::from_fn(|index| 7 * u8::try_from(index).expect("small")));
    let digits = hex(&secret);
    assert!(digits.starts_with("00070e15"));
    for digits in [digits.to_uppercase(), digits] {
        assert_eq!(parse(digits.as_bytes()).expect("its own digits").bytes(), secret.bytes());
    }
}

#[test]
fn it_is_not_shown() {
    let secret = Secret::from_bytes([0xab; 32]);
    assert_eq!(format!("{secret:?}"), "Secret(..)");
}

#[test]
fn a_drawn_one_is_another_each_time() {
    let draw = || Secret::draw().expect("random numbers");
    assert_ne!(draw().bytes(), draw().bytes());
}

#[test]
fn what_is_no_secret_is_refused_and_not_shown() {
    for (digits, said) in [
        ("", "it has 0 characters, it must have 64 hexadecimal digits"),
        (&"a".repeat(63), "it has 63 characters"),
        (&"g".repeat(64), "it has a character that is not a hexadecimal digit"),
    ] {
        let problem = parse(digits.as_bytes()).expect_err("refused");
        assert!(problem.starts_with(said), "{problem}");
        assert!(!problem.contains("ggg") && !problem.contains("aaa"), "{problem}");
    }
}

fn file_of(mode: u32, content: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("secret");
    fs::write(&path, content).expect("written");
    fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a mode");
    (folder, path)
}

#[test]
fn a_file_that_only_its_owner_may_read_is_read() {
    let secret = Secret::from_bytes([0x5a; 32]);
    for mode in [0o600, 0o400, 0o500, 0o700] {
        let (_folder, path) = file_of(mode, &format!("{}\n", hex(&secret)));
        let read = Secret::from_file(&path).unwrap_or_else(|error| panic!("{mode:o}: {error}"));
        assert_eq!(read.bytes(), secret.bytes());
    }
}

#[test]
fn other_files_are_refused() {
    let digits = "5a".repeat(32);
    for mode in [0o644, 0o640, 0o660, 0o610, 0o604, 0o440, 0o404, 0o402, 0o401] {
        let (_folder, path) = file_of(mode, &digits);
        let refused = Secret::from_file(&path).expect_err("others may read it").to_string();
        assert_eq!(
            refused,
            format!(
                "the secret in {}: its mode is {mode:04o}, but group and others must have no access, as with 0400 or 0600",
                path.display()
            )
        );
    }
    let (_folder, long) = file_of(0o600, &digits.repeat(3));
    let refused = Secret::from_file(&long).expect_err("too long").to_string();
    assert!(refused.ends_with("128 characters, it must have 64 hexadecimal digits"), "{refused}");
    let (folder, path) = file_of(0o600, &digits);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    assert!(Secret::from_file(&link).is_err(), "where a link leads may change");
    let refused = Secret::from_file(folder.path()).expect_err("a folder").to_string();
    assert!(refused.ends_with("not a file"), "{refused}");
}
