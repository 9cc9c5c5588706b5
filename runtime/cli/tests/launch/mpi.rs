//! Ranks that mpirun starts.

use std::env;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Instant;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::job::{Job, PATIENCE, command, meeting, ran, until_gone};
use crate::mpirun::replace_mpirun;
use crate::program::{Said, output};

/// Whether there is an mpirun of Open MPI.
pub(crate) fn is_open_mpi() -> bool {
    let output = Command::new("mpirun").arg("--version").output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"))
}

pub(crate) fn skipped(needs: &str) {
    let test = thread::current().name().unwrap_or_default().to_owned();
    writeln!(std::io::stderr(), "{test} skipped: needs {needs}").expect("written");
}

/// Whether there is an mpirun. Prints that the test is skipped if there is none.
fn is_there() -> bool {
    let is_there = Command::new("mpirun").arg("--version").output().is_ok();
    if !is_there {
        skipped("an mpirun in PATH");
    }
    is_there
}

/// The rank of a process, under Open MPI and under MPICH.
const RANK: &str = "rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK};";

#[test]
fn mpirun_starts_more_ranks_than_there_are_cores() {
    if !is_there() {
        return;
    }
    let cores = thread::available_parallelism().expect("known").get();
    let count = (cores + 1).to_string();
    let script =
        format!("{RANK} echo \"$rank $HSDP_RESTART $HSDP_LAUNCH_SOCKET.\"; echo to stderr >&2");
    let (code, said, told) = ran(&["launch", "-n", &count], &script);
    assert_eq!(code, Some(0), "{told}");
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    let mut expected: Vec<String> =
        (0..=cores).map(|rank| format!("[{rank}] {rank} 0 .")).collect();
    expected.sort_unstable();
    assert_eq!(lines, expected);
    assert_eq!(told.matches("] to stderr\n").count(), cores + 1);
}

#[test]
fn a_rank_that_ends_badly_ends_the_others_after_the_same_grace() {
    if !is_there() {
        return;
    }
    let folder = TempDir::new().expect("a folder");
    let logs = folder.path().display().to_string();
    let script = meeting(folder.path(), &[0, 2])
        + "if [ $rank = 1 ]; then others; exit 3; fi
           trap 'echo told' TERM; up; i=0; while [ $i -lt 60 ]; do sleep 0.05; i=$((i + 1)); done; echo done";
    let (code, said, told) = ran(&["launch", "-n", "3", "--logs", &logs], &script);
    assert_eq!(code, Some(3), "{told}");
    // The ranks take three seconds, longer than mpirun itself would wait.
    for line in ["[0] told", "[2] told", "[0] done", "[2] done"] {
        assert_eq!(said.lines().filter(|said| *said == line).count(), 1, "{said}");
    }
    let expected =
        "hsdp: rank 1 ended with exit code 3; the others get SIGTERM, and SIGKILL after 10 s\n";
    assert!(told.starts_with(expected), "{told}");
    assert!(told.ends_with("hsdp: attempt 0 failed: rank 1 ended with exit code 3\n"), "{told}");
    let log = fs::read_to_string(folder.path().join("attempt-0/rank-2.log")).expect("kept");
    assert_eq!(log, "told\ndone\n");
    assert!(folder.path().join("attempt-0/mpirun.log").exists());
}

#[test]
fn a_rank_that_is_killed_gives_its_signal_and_the_job_is_started_again() {
    if !is_there() {
        return;
    }
    let script = format!(
        "{RANK} if [ $HSDP_RESTART = 0 ] && [ $rank = 0 ]; then kill -9 $$; fi; echo attempt $HSDP_RESTART"
    );
    let (code, said, told) = ran(&["launch", "-n", "1", "--restarts", "1"], &script);
    assert_eq!((code, &*said), (Some(0), "[0] attempt 1\n"), "{told}");
    let expected = "hsdp: attempt 0 failed: rank 0 was killed by signal 9 (SIGKILL); starting again as attempt 1\n";
    assert!(told.contains(expected), "{told}");
}

#[test]
fn a_signal_is_passed_on_to_ranks_which_may_take_their_time() {
    if !is_there() {
        return;
    }
    let script = "exec 2>/dev/null; trap 'sleep 2; echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done";
    let mut job = Job::start(&["launch", "-n", "2"], script);
    assert_eq!(job.lines(2), ["[0] up\n", "[1] up\n"]);
    job.signal(Signal::SIGTERM);
    assert_eq!(job.lines(2), ["[0] saved\n", "[1] saved\n"]);
    let (code, _, told) = job.ended();
    let expected = "hsdp: SIGTERM is passed on to all ranks; a second signal kills them\n";
    assert_eq!((code, &*told), (Some(0), expected));
}

#[test]
fn a_launcher_that_is_killed_leaves_no_mpirun_and_no_rank() {
    if !is_there() {
        return;
    }
    let script = "trap '' TERM; sleep 300 & echo $!; echo $$; while :; do sleep 0.05; done";
    let mut job = Job::start(&["launch", "-n", "2"], script);
    let lines = job.lines(4);
    job.signal(Signal::SIGKILL);
    job.ended();
    let pids: Vec<String> = lines.iter().map(|line| line[4..].trim().to_owned()).collect();
    until_gone(&pids);
}

/// Returns a folder with a program `mpirun`, and the PATH in which it is the first.
pub(crate) fn with_mpirun(script: &str) -> (TempDir, String) {
    let folder = TempDir::new().expect("a folder");
    replace_mpirun(folder.path(), script);
    let path = format!("{}:{}", folder.path().display(), env::var("PATH").unwrap_or_default());
    (folder, path)
}

/// Runs a job of two ranks with a script in place of mpirun.
fn by(mpirun: &str, script: &str) -> Said {
    let (_folder, path) = with_mpirun(&format!("#!/bin/sh\n{mpirun}\n"));
    let mut command = command(&["launch", "-n", "2", "--grace", "1", "--", "sh", "-c", script]);
    output(command.env("PATH", path))
}

/// The script has the name, the options and the variable of MPICH.
#[test]
fn ranks_may_be_those_of_mpich() {
    let mpich = r#"
        if [ "$1" = --version ]; then echo "HYDRA build details:"; exit; fi
        [ "$1 $2" = "-n 2" ] || exit 9; shift 2
        PMI_RANK=1 "$@" & PMI_RANK=0 "$@"; wait"#;
    let (code, said, told) = by(mpich, "echo $PMI_RANK");
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!((code, lines, &*told), (Some(0), vec!["[0] 0", "[1] 1"], ""));
}

/// This mpirun starts a rank when the one before it has ended.
#[test]
fn a_rank_that_has_ended_well_leaves_while_another_is_awaited() {
    let one_by_one = r#"
        if [ "$1" = --version ]; then echo "HYDRA build details:"; exit; fi
        shift 2; PMI_RANK=0 "$@" && PMI_RANK=1 "$@""#;
    let (code, said, told) = by(one_by_one, "echo $PMI_RANK");
    assert_eq!((code, &*said, &*told), (Some(0), "[0] 0\n[1] 1\n", ""));
}

#[test]
fn an_mpirun_that_starts_nothing_is_told() {
    let (code, said, told) = by("exit 0", "echo here");
    let expected = "hsdp: attempt 0 failed: mpirun ended before its ranks\n";
    assert_eq!((code, &*said, &*told), (Some(1), "", expected));
    let (code, _, told) = by("echo no slots >&2; exit 4", "echo here");
    assert_eq!(code, Some(4));
    let mut lines: Vec<&str> = told.lines().collect();
    lines.sort_unstable();
    let expected = ["[mpirun] no slots", "hsdp: attempt 0 failed: mpirun ended with exit code 4"];
    assert_eq!(lines, expected);
}

/// It loads its libraries from a busy network, for example.
#[test]
fn an_mpirun_that_is_slow_to_tell_its_version_gets_the_options_of_its_mpi() {
    let slow = r#"
        if [ "$1" = --version ]; then sleep 6; echo "mpirun (Open MPI) 4.1.4"; exit; fi
        [ "$OMPI_MCA_odls_base_sigkill_timeout" = 0 ] || exit 9
        while [ "${1#-}" != "$1" ] || [ "$1" = 2 ]; do shift; done
        OMPI_COMM_WORLD_RANK=0 "$@" & OMPI_COMM_WORLD_RANK=1 "$@"; wait"#;
    let (code, _, told) = by(slow, "echo here");
    assert_eq!((code, &*told), (Some(0), ""));
}

#[test]
fn an_mpirun_that_tells_no_version_is_one_line() {
    let (folder, path) = with_mpirun("#!/there/is/no/such\n");
    let mut command = command(&["launch", "-n", "2", "--", "sh", "-c", "echo here"]);
    let (code, _, told) = output(command.env("PATH", path));
    let expected = format!(
        "hsdp: cannot ask mpirun for its version: {}/mpirun: No such file or directory (os error 2)\n",
        folder.path().display()
    );
    assert_eq!((code, told), (Some(2), expected));
}

/// A process of mpirun holds its stdout, so the launcher waits for further lines.
#[test]
fn a_signal_after_the_end_of_an_attempt_starts_no_other() {
    let fails = r#"
        if [ "$1" = --version ]; then echo "HYDRA build details:"; exit; fi
        sleep 4 & echo $$; exit 4"#;
    let (_folder, path) = with_mpirun(&format!("#!/bin/sh\n{fails}\n"));
    let mut launch = command(&["launch", "-n", "2", "--restarts", "3", "--", "true"]);
    launch.env("PATH", path);
    let mut job = Job::spawn(launch);
    let line = job.lines(1).remove(0);
    let pid = line.strip_prefix("[mpirun] ").expect("a line of mpirun").trim().to_owned();
    let pid = Path::new("/proc").join(pid);
    let began = Instant::now();
    while pid.exists() {
        assert!(began.elapsed() < PATIENCE, "mpirun is not reaped");
        thread::yield_now();
    }
    job.signal(Signal::SIGTERM);
    let (code, _, told) = job.ended();
    assert_eq!(code, Some(4), "{told}");
    assert!(told.ends_with("hsdp: attempt 0 failed: mpirun ended with exit code 4\n"), "{told}");
}

/// This happens where variables of another job hide those of this one. The second process fails,
/// and mpirun ends with it.
#[test]
fn two_of_one_rank_are_an_end_and_no_wait() {
    let twice = r#"
        if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; exit; fi
        while [ "${1#-}" != "$1" ] || [ "$1" = 2 ]; do shift; done
        one() { OMPI_COMM_WORLD_RANK=0 "$@" || kill $$; }
        one "$@" & one "$@" & wait"#;
    let (code, said, told) = by(twice, "echo here; while :; do sleep 0.02; done");
    assert_eq!(code, Some(128 + 15), "{told}");
    assert!(said.matches("here").count() <= 1, "only the first may run its command: {said}");
    let refused = "hsdp: a process that claims rank 0 is refused: another process runs the rank\n";
    assert_eq!(told.matches(refused).count(), 1, "{told}");
    let expected = "hsdp: attempt 0 failed: mpirun was killed by signal 15 (SIGTERM)\n";
    assert!(told.ends_with(expected), "{told}");
}
