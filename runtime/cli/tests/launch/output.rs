//! The output of ranks.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::job::{Job, NCCL, PATIENCE, command, ran, until_gone};

/// Each rank writes lines in two parts, on both streams, as fast as it can.
#[test]
fn lines_are_whole_and_have_their_rank() {
    let script = r#"
        text=$(printf "%0900d" "$RANK"); i=0
        while [ $i -lt 300 ]; do
            printf "$i "; printf "$text\n"; printf "$i " >&2; printf "$text\n" >&2; i=$((i + 1))
        done"#;
    let (code, said, told) = ran(&[&NCCL[..], &["-n", "4"]].concat(), script);
    assert_eq!(code, Some(0));
    for output in [said, told] {
        let mut next = [0; 4];
        for line in output.lines() {
            let parts: Vec<&str> = line.split(' ').collect();
            let rank: usize = parts[0].trim_matches(['[', ']']).parse().expect("a rank");
            let text = format!("{rank:0900}");
            assert_eq!(parts, [&*format!("[{rank}]"), &next[rank].to_string(), &text]);
            next[rank] += 1;
        }
        assert_eq!(next, [300; 4]);
    }
}

#[test]
fn the_last_line_needs_no_end_and_bytes_need_be_no_text() {
    let mut job = command(&[&NCCL[..], &["-n", "1", "--", "printf", r"a\377\n\nb"]].concat());
    let output = job.output().expect("the program starts");
    assert_eq!(output.stdout, b"[0] a\xff\n[0] \n[0] b\n");
}

#[test]
fn logs_have_the_lines_of_each_rank_and_attempt() {
    let folder = TempDir::new().expect("a folder");
    let logs = folder.path().join("logs");
    let options = ["-n", "2", "--restarts", "1", "--logs", &logs.display().to_string()];
    let script = r#"echo "out $RANK"; echo "err $RANK" >&2; exit "$((1 - HSDP_RESTART))""#;
    let (code, _, _) = ran(&[&NCCL[..], &options].concat(), script);
    assert_eq!(code, Some(0));
    for (attempt, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let log = logs.join(format!("attempt-{attempt}/rank-{rank}.log"));
        let log = fs::read_to_string(&log).expect("kept");
        let mut lines: Vec<&str> = log.lines().collect();
        lines.sort_unstable();
        // The other rank may have ended first.
        let is_there = lines == [format!("err {rank}"), format!("out {rank}")];
        assert!(is_there || (attempt == 0 && lines.len() < 2), "{attempt} {rank}: {log}");
    }
}

#[test]
fn logs_that_cannot_be_kept_are_refused_before_anything_starts() {
    let folder = TempDir::new().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("written");
    let logs = file.display().to_string();
    let (code, said, told) = ran(&[&NCCL[..], &["-n", "1", "--logs", &logs]].concat(), "echo here");
    assert_eq!((code, &*said), (Some(2), ""));
    assert!(told.starts_with(&format!("hsdp: cannot make {logs}/attempt-0: ")), "{told}");
    assert_eq!(told.lines().count(), 1);
}

/// A thread of the launcher waits in a write to the test, which reads nothing.
#[test]
fn a_reader_that_stands_still_does_not_keep_a_signal_from_the_ranks() {
    let folder = TempDir::new().expect("a folder");
    let count = folder.path().join("count");
    let script = format!(
        "echo $$; i=0; while :; do i=$((i + 1)); printf '%09000d\\n' $i; echo $i > {}; done",
        count.display()
    );
    let mut job = Job::start(&[&NCCL[..], &["-n", "1"]].concat(), &script);
    let pid = job.lines(1).remove(0)[4..].trim().to_owned();
    until_still(&count);
    job.signal(Signal::SIGTERM);
    until_gone(&[pid]);
    let (code, _, told) = job.ended();
    assert_eq!(code, Some(128 + 15), "{told}");
}

/// Waits until a file is there, and no longer changes. On a busy machine the processes between its
/// writer and the reader wait for a core one after the other.
pub(crate) fn until_still(file: &Path) {
    let began = Instant::now();
    let mut last = Vec::new();
    let mut since = began;
    while last.is_empty() || since.elapsed() < Duration::from_millis(900) {
        let now = fs::read(file).unwrap_or_default();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        assert!(began.elapsed() < PATIENCE, "it changes for ever, or is never there");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// A process of the rank fills stdout up to the test, which reads nothing, and ends with the rank.
/// The last lines of the rank fit into the pipe of its stderr, so the rank ends with success while
/// they are there.
#[test]
fn the_last_lines_of_a_rank_wait_for_a_reader_that_stands_still() {
    const LINES: usize = 40;
    let folder = TempDir::new().expect("a folder");
    let [count, go] = ["count", "go"].map(|name| folder.path().join(name));
    let script = format!(
        "echo $$; (i=0; while :; do i=$((i + 1)); printf '%09000d\\n' $i; echo $i > {}; done) &
         until [ -e {} ]; do sleep 0.02; done
         i=0; while [ $i -lt {LINES} ]; do printf '%01000d\\n' $i; i=$((i + 1)); done >&2",
        count.display(),
        go.display()
    );
    let mut job = Job::start(&[&NCCL[..], &["-n", "1"]].concat(), &script);
    let pid = job.lines(1).remove(0)[4..].trim().to_owned();
    until_still(&count);
    fs::write(&go, "").expect("written");
    until_gone(&[pid]);
    // Longer than the pipes of a rank that has ended may be empty.
    let paused = Instant::now();
    while paused.elapsed() < Duration::from_secs(3) {
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let (code, _, told) = job.ended();
    let expected: String = (0..LINES).map(|line| format!("[0] {line:01000}\n")).collect();
    assert_eq!(code, Some(0), "{} lines", told.lines().count());
    assert!(told == expected, "{} of {LINES} lines", told.lines().count());
}

/// It has left the rank's group, and holds its pipes.
#[test]
fn a_process_that_a_rank_leaves_behind_does_not_keep_the_job() {
    let folder = TempDir::new().expect("a folder");
    let up = folder.path().join("up").display().to_string();
    let script = format!(
        "setsid sh -c 'trap \"\" PIPE; while :; do echo; : > {up}; sleep 0.3; done' &
         until [ -e {up} ]; do sleep 0.02; done; echo $!"
    );
    let mut job = Job::start(&[&NCCL[..], &["-n", "1"]].concat(), &script);
    let mut line = String::new();
    while line.is_empty() || line == "[0] \n" {
        line = job.lines(1).remove(0);
    }
    let (code, _, told) = job.ended();
    let left = line[4..].trim().parse().expect("a number of a process");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(left), Signal::SIGKILL).expect("it is there");
    assert_eq!((code, &*told), (Some(0), ""));
}

#[test]
fn output_that_a_full_disk_takes_away_is_told_once_and_is_no_success() {
    let folder = TempDir::new().expect("a folder");
    let logs = folder.path().join("logs").display().to_string();
    let options = ["-n", "2", "--logs", &logs, "--", "sh", "-c", "echo one; echo two"];
    let mut job = command(&[&NCCL[..], &options].concat());
    let output = hsdp_train::testing::on_a_full_disk(&mut job).expect("the program starts");
    let told = String::from_utf8_lossy(&output.stderr);
    let expected = "hsdp: cannot print to stdout: No space left on device (os error 28): some output of the ranks is lost\n\
                    hsdp: 4 lines of output could not be written, and are lost\n";
    assert_eq!((output.status.code(), &*told), (Some(1), expected));
    let log = fs::read_to_string(format!("{logs}/attempt-0/rank-1.log")).expect("kept");
    assert_eq!(log, "one\ntwo\n");
}
