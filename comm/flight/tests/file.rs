//! Files that are no records.

use std::path::Path;

use hsdp_flight::FlightRecord;

#[test]
fn a_file_that_is_not_there_is_said_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = FlightRecord::read_from(&folder.path().join("rank-0.json")).expect_err("no file");
    assert!(error.to_string().contains("rank-0.json"), "{error}");
}

/// A read of a FIFO would wait for a writer, which never comes.
#[test]
#[cfg(unix)]
fn only_a_regular_file_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("rank-0.json");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("it starts");
    assert!(made.success());
    for path in [&*fifo, folder.path(), Path::new("/dev/zero")] {
        let (done, ended) = std::sync::mpsc::channel();
        let read = path.to_owned();
        std::thread::spawn(move || {
            let error = FlightRecord::read_from(&read).expect_err("no record");
            done.send(error.to_string())
        });
        let error = ended.recv_timeout(std::time::Duration::from_secs(20)).expect("no wait");
        assert_eq!(error, format!("{}: it is not a regular file", path.display()));
    }
}
