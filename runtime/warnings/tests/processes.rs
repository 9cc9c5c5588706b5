//! Warnings of processes with and without a subscriber, as their stderr shows them.
//!
//! The test program is also the program of the processes: it plays the part that `HSDP_TEST_PART`
//! in its environment names.

use std::env;
use std::io::Read as _;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{set_global_default, with_default};
use tracing::{Event, Metadata, Subscriber};

const PART: &str = "HSDP_TEST_PART";

/// Number of lines that fill any pipe.
const MANY: usize = 2000;

fn main() -> ExitCode {
    if let Ok(part) = env::var(PART) {
        return play(&part);
    }
    /// Names a trial of each function.
    macro_rules! trials {
        ($($name:ident),* $(,)?) => {
            vec![$(Trial::test(stringify!($name), || { $name(); Ok(()) })),*]
        };
    }
    let trials = trials![
        a_text_is_a_line_once,
        values_are_written_as_a_program_writes_them,
        a_subscriber_of_the_process_takes_the_warnings_over,
        a_subscriber_of_one_thread_takes_over_its_warnings_only,
        warnings_can_be_silenced,
        a_subscriber_may_come_after_the_first_warning,
        a_closed_stderr_is_ignored,
        a_reader_that_blocks_holds_nothing_up,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn play(part: &str) -> ExitCode {
    match part {
        "plain" => {
            for step in [7, 7, 8] {
                hsdp_warnings::warn!(step, "the disk is nearly full");
            }
            hsdp_warnings::error!("the disk is full");
        }
        "values" => values(),
        "global" => {
            set_global_default(Counting).expect("it is the first");
            hsdp_warnings::warn!("the disk is nearly full");
            assert_eq!(RECEIVED.load(Ordering::Relaxed), 1);
        }
        "scoped" => {
            with_default(Counting, || {
                hsdp_warnings::warn!("on this thread");
                let other = || hsdp_warnings::warn!("on another thread");
                thread::spawn(other).join().expect("no panic");
            });
            hsdp_warnings::warn!("afterwards");
            assert_eq!(RECEIVED.load(Ordering::Relaxed), 1);
        }
        "silenced" => {
            hsdp_warnings::silence_warnings();
            hsdp_warnings::warn!("the disk is nearly full");
        }
        "late" => {
            hsdp_warnings::warn!("before");
            set_global_default(Counting).expect("the library has installed no subscriber");
            hsdp_warnings::warn!("after");
            assert_eq!(RECEIVED.load(Ordering::Relaxed), 1);
        }
        "many" => {
            for step in 0..MANY {
                hsdp_warnings::warn!(step, "the disk is nearly full, and so on: {:>900}", "");
            }
        }
        part => panic!("{part} is no part"),
    }
    ExitCode::SUCCESS
}

fn values() {
    let rank = 3_usize;
    let reason = "a\nb";
    let absent = None::<u32>;
    let path = "out";
    let ranks = [1, 2];
    hsdp_warnings::warn!(
        rank,
        reason,
        absent,
        %path,
        ?ranks,
        next = rank + 1,
        folder = %format_args!("{path}/x"),
        later = ?Some(4),
        "{path} is full: {} of {rank}",
        2
    );
}

fn a_text_is_a_line_once() {
    let expected = "hsdp: warning: the disk is nearly full (step: 7)\n\
                    hsdp: warning: the disk is nearly full (step: 8)\n\
                    hsdp: error: the disk is full\n";
    assert_eq!(stderr_of("plain"), expected);
}

fn values_are_written_as_a_program_writes_them() {
    let expected = "hsdp: warning: out is full: 2 of 3 (rank: 3, reason: a\\nb, path: out, \
                    ranks: [1, 2], next: 4, folder: out/x, later: Some(4))\n";
    assert_eq!(stderr_of("values"), expected);
}

fn a_subscriber_of_the_process_takes_the_warnings_over() {
    assert_eq!(stderr_of("global"), "");
}

fn a_subscriber_of_one_thread_takes_over_its_warnings_only() {
    let expected = "hsdp: warning: on another thread\nhsdp: warning: afterwards\n";
    assert_eq!(stderr_of("scoped"), expected);
}

fn warnings_can_be_silenced() {
    assert_eq!(stderr_of("silenced"), "");
}

fn a_subscriber_may_come_after_the_first_warning() {
    assert_eq!(stderr_of("late"), "hsdp: warning: before\n");
}

fn a_closed_stderr_is_ignored() {
    let mut child = program("many").stderr(Stdio::piped()).spawn().expect("a process");
    drop(child.stderr.take());
    assert!(child.wait().expect("it ends").success());
}

/// A pipe without a reader accepts some lines. The process waits for one write in vain, and ends.
fn a_reader_that_blocks_holds_nothing_up() {
    let begun = Instant::now();
    let mut child = program("many").stderr(Stdio::piped()).spawn().expect("a process");
    let mut reader = child.stderr.take().expect("a pipe");
    assert!(child.wait().expect("it ends").success());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("lines");
    let lines = text.lines().count();
    assert!(0 < lines && lines < MANY, "{lines} lines");
}

fn program(part: &str) -> Command {
    let mut program = Command::new(env::current_exe().expect("the test program"));
    program.env(PART, part);
    program
}

fn stderr_of(part: &str) -> String {
    let Output { status, stderr, .. } = program(part).output().expect("a process");
    let stderr = String::from_utf8(stderr).expect("text");
    assert!(status.success(), "{stderr}");
    stderr
}

static RECEIVED: AtomicUsize = AtomicUsize::new(0);

/// A subscriber that counts events.
struct Counting;

impl Subscriber for Counting {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        RECEIVED.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
