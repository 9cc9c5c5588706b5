//! Signals that the launcher gets.

use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::ranks::{Event, News};

/// Sends each SIGINT and SIGTERM as an event, instead of ending the process.
pub(super) fn forward(events: &Sender<News>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let events = events.clone();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let _ = events.send(News { attempt: None, event: Event::Signal(signal) });
        }
    })?;
    Ok(())
}
