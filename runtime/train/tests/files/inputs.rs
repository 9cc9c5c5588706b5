//! Files that a program reads: only regular ones, up to a length, and without blocking.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;

use hsdp_train::file::{lines, read, read_text, read_texts};
use tempfile::TempDir;

use crate::{at_once, fifo};

/// Returns the error of reading a file with a limit of 1000 bytes.
fn refusal(path: &Path) -> String {
    let path = path.to_owned();
    at_once(move || read_text(&path, 1000)).expect_err("a file that is refused").to_string()
}

#[test]
fn a_fifo_a_device_and_a_directory_are_refused_at_once() {
    let folder = TempDir::new().expect("a folder");
    let fifo = fifo(folder.path(), "fifo");
    assert!(refusal(&fifo).ends_with("/fifo: it is a FIFO; a regular file is needed"));
    assert!(refusal(folder.path()).ends_with(": it is a directory; a regular file is needed"));
    let expected = "/dev/zero: it is a device; a regular file is needed";
    assert_eq!(refusal(Path::new("/dev/zero")), expected);
    let link = folder.path().join("link");
    symlink(&fifo, &link).expect("a link");
    assert!(refusal(&link).ends_with("/link: it is a FIFO; a regular file is needed"));
}

#[test]
fn a_file_is_read_up_to_its_limit() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("file");
    fs::write(&path, vec![b'x'; 1000]).expect("written");
    assert_eq!(read(&path, 1000).expect("a file"), vec![b'x'; 1000]);
    assert_eq!(read_text(&path, u64::MAX).expect("a text").len(), 1000);
    fs::write(&path, vec![b'x'; 1001]).expect("written");
    assert!(refusal(&path).ends_with("/file: it has more than 1000 bytes"));
    // A hole takes no space on the disk, but would take memory.
    let hole = File::create(&path).expect("a file");
    hole.set_len(1 << 40).expect("a hole");
    assert!(refusal(&path).ends_with("/file: it has more than 1000 bytes"));
    fs::write(&path, [0xff]).expect("written");
    assert!(refusal(&path).ends_with("/file: it is not UTF-8 text"));
}

/// Files in /proc report a length of 0.
#[test]
#[cfg(target_os = "linux")]
fn a_file_that_is_longer_than_it_says_is_refused() {
    assert_eq!(refusal(Path::new("/proc/kallsyms")), "/proc/kallsyms: it has more than 1000 bytes");
}

#[test]
fn the_error_is_one_line_for_a_name_with_newlines() {
    let error = refusal(Path::new("/no\nsuch\u{1b}[2Jfile"));
    assert_eq!(error, "/no\\nsuch\\u{1b}[2Jfile: No such file or directory (os error 2)");
}

#[test]
fn a_file_of_any_length_is_read_line_by_line() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("file");
    let all = |most| lines(&path, most).expect("a file").collect::<Result<Vec<_>, _>>();
    fs::write(&path, "one\n\nthree").expect("written");
    assert_eq!(all(5).expect("lines"), [&b"one"[..], b"", b"three"]);
    let long = all(4).expect_err("five bytes").to_string();
    assert!(long.ends_with("/file: line 3 has more than 4 bytes"), "{long}");
    fs::write(&path, "four\n").expect("written");
    assert_eq!(all(4).expect("lines"), [b"four"]);
    // A hole reads as one line of zeros.
    let hole = File::create(&path).expect("a file");
    hole.set_len(1 << 40).expect("a hole");
    let long = all(1000).expect_err("a long line").to_string();
    assert!(long.ends_with("/file: line 1 has more than 1000 bytes"), "{long}");
    let folder = lines(folder.path(), 1000).expect_err("no file").to_string();
    assert!(folder.ends_with(": it is a directory; a regular file is needed"), "{folder}");
}

#[test]
fn texts_are_those_of_regular_files_with_a_bound_on_their_sum() {
    let folder = TempDir::new().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    for folder in ["b", "target", ".hidden", "folder.md"] {
        fs::create_dir(path(folder)).expect("a folder");
    }
    for name in ["c.md", "b/a.md", "a.md", "a.txt", "target/a.md", ".hidden/a.md", "folder.md/d.md"]
    {
        fs::write(path(name), name).expect("written");
    }
    // Reading one of these would return other content, or never end.
    symlink("/dev/zero", path("zero.md")).expect("a link");
    fifo(folder.path(), "fifo.md");
    let text = "a.md\nb/a.md\nc.md\nfolder.md/d.md";
    let most = text.len() as u64;
    assert_eq!(read_texts(folder.path(), "md", most).expect("a text"), text);
    let refused = read_texts(folder.path(), "md", most - 1).expect_err("too long").to_string();
    assert!(refused.ends_with(&format!("it has more than {} bytes", most - 1)), "{refused}");
}

#[test]
fn texts_are_also_those_of_links_and_there_is_at_least_one() {
    let folder = TempDir::new().expect("a folder");
    let elsewhere = TempDir::new().expect("another");
    let none = read_texts(folder.path(), "md", 100).expect_err("no file").to_string();
    assert!(none.ends_with(": there is no file .md in it"), "{none}");
    let linked = elsewhere.path().join("text");
    fs::write(&linked, "linked").expect("written");
    symlink(&linked, folder.path().join("b.md")).expect("a link");
    symlink(folder.path(), folder.path().join("c.md")).expect("a link");
    fs::write(folder.path().join("a.md"), "own").expect("written");
    assert_eq!(read_texts(folder.path(), "md", 100).expect("a text"), "own\nlinked");
    fs::remove_file(linked).expect("removed");
    let lost = read_texts(folder.path(), "md", 100).expect_err("it is lost").to_string();
    assert!(lost.ends_with("/b.md: No such file or directory (os error 2)"), "{lost}");
}
