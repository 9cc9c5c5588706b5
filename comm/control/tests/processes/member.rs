//! The program of a process of these worlds.

use std::env;
use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use hsdp_control::{Bootstrap, Deadlines, Joined, State, Status};

use crate::exchange::{Exchange, wait_for};
use crate::{crowd, squatter};

/// The longest time for which a process waits.
const LONG: Duration = Duration::from_secs(30);

/// The number of rounds, and the round before which rank 0 waits for a line from the test.
const ROUNDS: u32 = 40;
const HALF: u32 = ROUNDS / 2;

pub(crate) fn run(part: &str) -> ExitCode {
    match act(part) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The test may no longer read it.
            let _ = writeln!(io::stderr().lock(), "{error}");
            ExitCode::from(2)
        }
    }
}

pub(crate) fn say(words: &str) {
    // The test may have stopped reading.
    let _ = writeln!(io::stdout().lock(), "{words}");
}

/// Waits for a line from the test, or for the end of the test.
pub(crate) fn wait_to_be_told() {
    let _ = io::stdin().read_line(&mut String::new());
}

/// The number that a test has set, or this default.
pub(crate) fn number(name: &str, otherwise: u32) -> u32 {
    let value = env::var(name).ok();
    value.map_or(otherwise, |value| value.parse().expect("a number"))
}

pub(crate) fn deadlines() -> Deadlines {
    let millis = |name, otherwise| Duration::from_millis(number(name, otherwise).into());
    Deadlines {
        rendezvous: millis("HSDP_TEST_RENDEZVOUS", 30_000),
        handshake: millis("HSDP_TEST_HANDSHAKE", 5_000),
        lost: number("HSDP_TEST_LOST", 100),
        beat: Duration::from_millis(200),
    }
}

fn act(part: &str) -> Result<(), String> {
    match part {
        "squat" => return squatter::run(),
        "crowd" => return crowd::join(),
        _ => {}
    }
    crowd::limit_descriptors();
    let joined = Bootstrap::from_env().and_then(|mut found| {
        found.options.deadlines = deadlines();
        found.join()
    });
    let joined = joined.map_err(|error| error.to_string())?;
    say("joined");
    match part {
        "watch" => watch(&joined),
        "rounds" => rounds(&joined)?,
        _ => exchange(&joined)?,
    }
    joined.finish(LONG).map_err(|error| error.to_string())
}

fn exchange(joined: &Joined) -> Result<(), String> {
    let pid = std::process::id().to_string();
    let pids = Exchange::of(&joined.membership).round(pid.as_bytes())?;
    let pids: Vec<String> =
        pids.into_iter().map(|pid| String::from_utf8_lossy(&pid).into_owned()).collect();
    say(&format!("pids {}", pids.join(" ")));
    Ok(())
}

/// Prints the changes of all members' states, until it is killed or the job ends.
fn watch(joined: &Joined) {
    let started = Instant::now();
    let mut last = vec![State::Alive; joined.membership.size()];
    while started.elapsed() < LONG {
        let is_news = |status: &Status| status.states != last || status.ended.is_some();
        let next = wait_for(&joined.membership, LONG, is_news);
        for (rank, (old, new)) in last.iter().zip(&next.states).enumerate() {
            if old != new {
                say(&format!("rank {rank}: {new:?}"));
            }
        }
        if let Some(error) = &next.ended {
            return say(&format!("ended: {error}"));
        }
        last = next.states.to_vec();
    }
}

/// Steps, each of which computes a new state from the states of all ranks. A rank that cannot continue prints its state.
fn rounds(joined: &Joined) -> Result<(), String> {
    let rank = joined.membership.rank().get();
    let mut exchange = Exchange::of(&joined.membership);
    let mut state = u64::from(rank) + 1;
    for round in 0..ROUNDS {
        if round == HALF {
            say("half");
            if rank == 0 {
                wait_to_be_told();
            }
        }
        // The value of a rank goes out when all have come to the round, so no rank has the values of a round that the others miss.
        let values = exchange.round(b"").and_then(|_| exchange.round(&state.to_le_bytes()));
        let values = values.inspect_err(|_| say(&format!("kept {state:016x}")))?;
        let bytes = values.into_iter().flatten();
        state = bytes.fold(state, |state, byte| {
            (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(5)
        });
        say(&format!("{state:016x}"));
    }
    Ok(())
}
