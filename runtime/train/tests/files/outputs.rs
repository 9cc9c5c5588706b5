//! Files that a program writes for a user: checked before the work, and complete or unchanged after
//! it.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use hsdp_train::file::Output;
use tempfile::TempDir;

use crate::{at_once, fifo};

/// Returns the error of a check.
fn refusal(path: &Path) -> String {
    let path = path.to_owned();
    at_once(move || Output::check(&path, &[]).map(drop))
        .expect_err("a file that is refused")
        .to_string()
}

/// Returns the names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let files = fs::read_dir(folder).expect("a folder").flatten();
    let mut names: Vec<_> = files.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_fifo_a_device_a_folder_and_what_has_no_folder_are_refused_at_once() {
    let folder = TempDir::new().expect("a folder");
    let fifo = fifo(folder.path(), "fifo");
    let error = refusal(&fifo);
    assert!(error.ends_with("/fifo: it is a FIFO; a regular file is needed"), "{error}");
    let error = refusal(Path::new("/dev/full"));
    assert_eq!(error, "/dev/full: it is a device; a regular file is needed");
    let error = refusal(folder.path());
    assert!(error.ends_with(": it is a directory; a regular file is needed"), "{error}");
    for (name, problem) in [
        ("none/file", "No such file or directory (os error 2)"),
        ("fifo/file", "Not a directory (os error 20)"),
        ("none/", "is a directory"),
        (&*"x".repeat(300), "File name too long (os error 36)"),
    ] {
        let error = refusal(&folder.path().join(name));
        assert!(error.ends_with(&format!("{name}: {problem}")), "{error}");
    }
    assert_eq!(refusal(Path::new("")), "the name of a file is empty");
    assert_eq!(names(folder.path()), ["fifo"], "a check leaves nothing behind");
}

/// Root may write everywhere, except where the file system itself refuses.
#[test]
fn a_folder_that_takes_no_file_is_refused() {
    let folder = TempDir::new().expect("a folder");
    let path = match is_root() {
        true => PathBuf::from("/proc/hsdp-output"),
        false => {
            fs::set_permissions(folder.path(), Permissions::from_mode(0o555)).expect("set");
            folder.path().join("file")
        }
    };
    let error = refusal(&path);
    let problems = ["Permission denied (os error 13)", "No such file or directory (os error 2)"];
    assert!(problems.iter().any(|it| error.ends_with(&format!(": {it}"))), "{error}");
}

fn is_root() -> bool {
    let user = Command::new("id").arg("-u").output().expect("it starts");
    user.stdout == b"0\n"
}

#[test]
fn an_input_is_no_output_by_any_of_its_names() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::write(at("input"), "precious").expect("written");
    symlink("input", at("link")).expect("a link");
    fs::hard_link(at("input"), at("second")).expect("a link");
    for name in ["input", "link", "second", "../folder/input"] {
        let path = match name {
            "../folder/input" => folder.path().join(".").join("input"),
            name => at(name),
        };
        let error = Output::check(&path, &[Path::new("/dev/null"), &at("input")]);
        let error = error.expect_err("an input").to_string();
        let expected = format!(
            "{}: it is an input, {}, and would be overwritten",
            path.display(),
            at("input").display()
        );
        assert_eq!(error, expected);
    }
    assert_eq!(fs::read(at("input")).expect("there"), b"precious");
}

#[test]
fn a_file_is_written_as_a_whole_or_stays_as_it_was() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("file");
    let output = Output::check(&path, &[]).expect("it can be written");
    assert!(!path.exists());
    let half = output.write(|sink| {
        sink.write_all(&[b'x'; 100_000])?;
        Err(io::Error::from_raw_os_error(28))
    });
    let error = half.expect_err("the disk is full").to_string();
    assert!(error.ends_with("/file: No space left on device (os error 28)"), "{error}");
    assert!(names(folder.path()).is_empty(), "nothing is left behind");
    output.write_all("first").expect("written");
    output.write_all("second").expect("written");
    assert!(output.write(|_| Err(io::ErrorKind::Other.into())).is_err());
    assert_eq!(fs::read(&path).expect("there"), b"second");
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn permissions_are_those_of_a_new_file_or_of_the_old_one() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let mode = |name: &str| fs::metadata(at(name)).expect("there").permissions().mode() & 0o7777;
    fs::write(at("other"), "").expect("written");
    Output::check(&at("new"), &[]).and_then(|it| it.write_all("new")).expect("written");
    assert_eq!(mode("new"), mode("other"), "as the umask has it");
    fs::set_permissions(at("other"), Permissions::from_mode(0o640)).expect("set");
    Output::check(&at("other"), &[]).and_then(|it| it.write_all("new")).expect("written");
    assert_eq!(mode("other"), 0o640);
}

#[test]
fn a_link_stays_and_its_file_is_written() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("inner")).expect("made");
    symlink("inner/file", at("link")).expect("a link");
    symlink("link", at("second")).expect("a link");
    for text in ["absent at first", "there"] {
        let output = Output::check(&at("second"), &[]).expect("it can be written");
        output.write_all(text).expect("written");
        assert_eq!(fs::read_to_string(at("inner/file")).expect("there"), text);
    }
    assert!(at("link").is_symlink() && at("second").is_symlink());
    symlink("circle", at("circle")).expect("a link");
    assert!(refusal(&at("circle")).contains("/circle: Too many levels of symbolic links"));
}

#[test]
fn two_names_of_one_file_are_not_two_outputs() {
    let folder = TempDir::new().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    symlink(folder.path(), at("again")).expect("a link");
    let one = Output::check(&at("file"), &[]).expect("it can be written");
    let second = Output::check(&at("again/file"), &[]).expect("it can be written");
    let error = second.differs_from(&one).expect_err("one file").to_string();
    assert!(error.ends_with("file: it is named twice, and has room for one output"), "{error}");
    let other = Output::check(&at("other"), &[]).expect("it can be written");
    other.differs_from(&one).expect("two files");
}

#[test]
fn the_null_device_takes_everything() {
    let output = Output::check(Path::new("/dev/null"), &[]).expect("it can be written");
    output.write_all("anything").expect("written");
    assert!(fs::metadata("/dev/null").is_ok_and(|it| !it.is_file()));
}
