//! What a process of these worlds does.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use hsdp_control::{Bootstrap, ControlError, Deadlines, Joined, State, Status};

/// Nobody waits for a test that hangs for longer.
const LONG: Duration = Duration::from_secs(30);

pub(crate) fn run() -> ExitCode {
    match join_and_act() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may read it any more.
            let _ = writeln!(io::stderr().lock(), "{error}");
            ExitCode::from(2)
        }
    }
}

fn say(words: &str) {
    // A test that has seen enough does not read on.
    let _ = writeln!(io::stdout().lock(), "{words}");
}

fn join_and_act() -> Result<(), ControlError> {
    let beat = Duration::from_millis(200);
    let deadlines = Deadlines { rendezvous: LONG, lost: 100, beat, ..Deadlines::default() };
    let joined = Bootstrap::from_env()?.deadlines(deadlines).join()?;
    say("joined");
    if std::env::var("HSDP_TEST_PART").is_ok_and(|part| part == "watch") {
        watch(&joined);
        return Ok(());
    }
    let pid = std::process::id().to_string();
    let pids = joined.membership.exchange("pids", pid.as_bytes())?;
    let pids: Vec<String> =
        pids.into_iter().map(|pid| String::from_utf8_lossy(&pid).into_owned()).collect();
    say(&format!("pids {}", pids.join(" ")));
    joined.finish(LONG)
}

/// Says what becomes of all, until it is killed.
fn watch(joined: &Joined) {
    let started = Instant::now();
    let mut last = vec![State::Alive; joined.membership.size()];
    while started.elapsed() < LONG {
        let is_news = |status: &Status| status.states() != last || status.ended().is_some();
        let next = joined.membership.wait_for(LONG, is_news);
        for (rank, (old, new)) in last.iter().zip(next.states()).enumerate() {
            if old != new {
                say(&format!("rank {rank}: {new:?}"));
            }
        }
        if let Some(error) = next.ended() {
            return say(&format!("ended: {error}"));
        }
        last = next.states().to_vec();
    }
}
