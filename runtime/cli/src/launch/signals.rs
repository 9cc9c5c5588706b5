//! Signals that the launcher receives.

use std::fs;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use super::ranks::{Event, News};

/// Signals that end a job.
pub(super) const FORWARDED: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Sends each of the signals as an event, instead of ending the process. A signal that this process
/// has ignored since its start, as under `nohup` or in the background of a script, stays ignored.
pub(super) fn forward(events: &Sender<News>) -> io::Result<()> {
    let ignored = ignored();
    let is_heeded = |signal: &i32| ignored & (1 << (signal - 1)) == 0;
    let mut signals = Signals::new(FORWARDED.into_iter().filter(is_heeded))?;
    let events = events.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let _ = events.send(News { attempt: None, event: Event::Signal(signal) });
        }
    })?;
    Ok(())
}

/// Returns the signals that this process ignores, one bit for each. Returns 0 if the system does
/// not report them.
fn ignored() -> u64 {
    fs::read_to_string("/proc/self/status").map_or(0, |status| mask(&status))
}

fn mask(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{SIGHUP, mask};

    #[test]
    fn the_mask_has_a_bit_for_each_ignored_signal() {
        let status = "Name:\thsdp\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(mask(status), 1 << 12 | 1 << (SIGHUP - 1));
        assert_eq!(mask("Name:\thsdp\n"), 0);
    }
}
