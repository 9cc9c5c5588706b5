//! Signals that the launcher gets.

use nix::sys::signal::Signal;

use crate::job::{Job, NCCL, until_gone};

/// Ranks that end with code 0 after a signal, as ranks that save a checkpoint first do.
const SAVING: &str = r#"
    exec 2>/dev/null; trap 'echo saved; exit 0' TERM INT; echo up; while :; do sleep 0.02; done"#;

#[test]
fn sigterm_is_passed_on_once_and_nothing_is_started_again() {
    for (signal, name) in [(Signal::SIGTERM, "SIGTERM"), (Signal::SIGINT, "SIGINT")] {
        let mut job = Job::start(&[&NCCL[..], &["-n", "3", "--restarts", "3"]].concat(), SAVING);
        assert_eq!(job.lines(3), ["[0] up\n", "[1] up\n", "[2] up\n"]);
        job.signal(signal);
        assert_eq!(job.lines(3), ["[0] saved\n", "[1] saved\n", "[2] saved\n"]);
        let (code, said, told) = job.ended();
        let expected =
            format!("hsdp: {name} is passed on to all ranks; a second signal kills them\n");
        assert_eq!((code, &*said, told), (Some(0), "", expected));
    }
}

#[test]
fn ranks_that_die_of_it_give_its_code_and_are_not_started_again() {
    let mut job = Job::start(
        &[&NCCL[..], &["-n", "2", "--restarts", "3"]].concat(),
        "echo up; while :; do sleep 0.02; done",
    );
    job.lines(2);
    job.signal(Signal::SIGTERM);
    let (code, _, told) = job.ended();
    assert_eq!(code, Some(128 + 15));
    assert!(told.ends_with(" was killed by signal 15 (SIGTERM)\n"), "{told}");
    assert!(!told.contains("starting again"), "{told}");
}

#[test]
fn the_second_signal_kills() {
    let script = "trap '' TERM INT; echo up; while :; do sleep 0.02; done";
    let mut job = Job::start(&[&NCCL[..], &["-n", "2"]].concat(), script);
    job.lines(2);
    job.signal(Signal::SIGINT);
    job.signal(Signal::SIGTERM);
    let (code, _, told) = job.ended();
    assert_eq!(code, Some(128 + 9));
    // Two signals at once may come in either order.
    assert!(told.contains(" again: SIGKILL for ranks 0, 1\n"), "{told}");
}

/// Processes that the ranks have started end, too.
#[test]
fn a_launcher_that_is_killed_leaves_nothing_behind() {
    let script = "trap '' TERM; sleep 300 & echo $!; echo $$; while :; do sleep 0.05; done";
    let mut job = Job::start(&[&NCCL[..], &["-n", "2"]].concat(), script);
    let lines = job.lines(4);
    job.signal(Signal::SIGKILL);
    let (code, _, _) = job.ended();
    assert_eq!(code, None);
    let pids: Vec<String> = lines.iter().map(|line| line[4..].trim().to_owned()).collect();
    until_gone(&pids);
}

/// If the attendant itself is killed, the system kills its command.
#[test]
fn an_attendant_that_is_killed_takes_its_rank_with_it() {
    let script = "echo \"$PPID $$\"; while :; do sleep 0.05; done";
    let mut job = Job::start(&[&NCCL[..], &["-n", "1"]].concat(), script);
    let line = job.lines(1).remove(0);
    let (attendant, rank) = line[4..].trim().split_once(' ').expect("two numbers");
    let pid = nix::unistd::Pid::from_raw(attendant.parse().expect("a number"));
    nix::sys::signal::kill(pid, Signal::SIGKILL).expect("it is there");
    let (code, _, told) = job.ended();
    assert_eq!(code, Some(128 + 9));
    assert!(told.ends_with("rank 0 was killed by signal 9 (SIGKILL)\n"), "{told}");
    until_gone(&[rank.to_owned()]);
}
