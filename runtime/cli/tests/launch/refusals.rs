//! Jobs that are refused: one line on stderr, and no process is started.

use tempfile::TempDir;

use crate::job::{command, in_shell};
use crate::program::{Said, hsdp, output};

#[test]
fn what_makes_no_sense_is_one_line() {
    for (arguments, expected) in [
        (
            &["launch", "-n", "2"][..],
            "the following required arguments were not provided: <CMD>...",
        ),
        (
            &["launch", "--", "true"],
            "the following required arguments were not provided: --ranks <COUNT>",
        ),
        (
            &["launch", "-n", "0", "--", "true"],
            "invalid value '0' for '--ranks <COUNT>': 0 is not in 1..=1024",
        ),
        (
            &["launch", "-n", "1", "--comm", "torchrun-like", "--", "true"],
            "invalid value 'torchrun-like' for '--comm <COMM>' [possible values: mpi, nccl]",
        ),
        (
            &["launch", "-n", "1", "--comm", "nccl", "--", "./there-is-no-such"],
            "./there-is-no-such: no such program, here or in PATH",
        ),
    ] {
        let expected = (Some(2), String::new(), format!("hsdp: {expected}\n"));
        assert_eq!(hsdp(arguments), expected, "{arguments:?}");
    }
}

#[test]
fn the_name_of_a_program_does_not_change_the_terminal() {
    let parent = std::process::id().to_string();
    let arguments = ["launch-exec", "--parent", &parent, "--", "./no\nsuch\u{1b}[2J"];
    let (code, _, told) = hsdp(&arguments);
    let expected =
        "hsdp: cannot start ./no\\nsuch\\u{1b}[2J: No such file or directory (os error 2)\n";
    assert_eq!((code, &*told), (Some(127), expected));
}

/// Returns the exit code and stderr of a job that is refused.
fn refused(variables: &[(&str, &str)], without: &[&str]) -> (Option<i32>, String) {
    let mut command = command(&["launch", "-n", "2", "--", "/bin/true"]);
    without.iter().for_each(|name| {
        command.env_remove(name);
    });
    let (code, _, told) = output(command.envs(variables.iter().copied()));
    (code, told)
}

#[test]
fn a_rank_of_torchrun_is_told_what_to_start_instead() {
    let set = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
    let expected = "hsdp: RANK, WORLD_SIZE, MASTER_ADDR are set, as by torchrun, which has started this process as one rank: \
                    start `hsdp launch -n 2 --comm nccl -- CMD` without torchrun\n";
    assert_eq!(refused(&set, &[]), (Some(2), expected.to_owned()));
}

#[test]
fn without_mpirun_it_says_what_to_install() {
    let empty = TempDir::new().expect("a folder");
    let path = empty.path().display().to_string();
    let expected = "hsdp: no mpirun in PATH: install Open MPI (openmpi-bin, libopenmpi-dev) or MPICH (mpich, libmpich-dev)\n";
    assert_eq!(refused(&[("PATH", &path)], &[]), (Some(2), expected.to_owned()));
}

#[test]
fn root_has_to_allow_itself() {
    if !nix::unistd::Uid::effective().is_root() || !crate::mpi::is_open_mpi() {
        return crate::mpi::skipped("Open MPI, and root");
    }
    let expected = "hsdp: Open MPI starts nothing for root unless OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 are set\n";
    let refused = refused(&[], &["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]);
    assert_eq!(refused, (Some(2), expected.to_owned()));
}

/// Runs a job of 40 ranks under limits of open files.
fn limited(limits: &str) -> Said {
    let job = command(&["launch", "--comm", "nccl", "-n", "40", "--", "sh", "-c", "ulimit -Sn"]);
    output(&mut in_shell(&format!("{limits}; exec \"$@\""), &job))
}

#[test]
fn more_ranks_than_open_files_raise_the_limit_or_are_refused() {
    let (code, said, told) = limited("ulimit -Sn 40");
    assert_eq!((code, &*told), (Some(0), ""));
    assert_eq!(said.matches("] 72\n").count(), 40, "{said}");
    let expected = "hsdp: 40 ranks need 72 open files of this process, and its hard limit is 40 (ulimit -Hn): \
                    raise it, or start fewer ranks\n";
    assert_eq!(limited("ulimit -n 40"), (Some(2), String::new(), expected.to_owned()));
}

/// Where a thread has no memory, the launcher or one of its attendants is the first to notice. No
/// job hangs, and none panics.
#[test]
fn a_limit_of_memory_is_an_error_and_no_panic() {
    for most in [20_000, 30_000, 40_000, 60_000] {
        let job = command(&["launch", "--comm", "nccl", "-n", "8", "--grace", "1", "--", "true"]);
        let mut limited = in_shell(&format!("ulimit -v {most}; exec \"$@\""), &job);
        let output = limited.output().expect("it starts");
        let told = String::from_utf8_lossy(&output.stderr);
        // A thread without memory for the stack of its signals panics in the standard library,
        // before it runs any code of ours.
        let is_ours = |line: &str| line.contains("panicked") && !line.contains("/library/std/");
        assert!(!told.lines().any(is_ours), "{most} KiB: {told}");
    }
}
