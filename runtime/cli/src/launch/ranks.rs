//! What the attendants of ranks say to the launcher.

use std::io::{self, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::end::End;
use super::frame::Frame;
use super::terminal::Terminal;

/// What has happened.
#[derive(Debug)]
pub(super) enum Event {
    /// A rank's attendant is there, and takes orders.
    Joined { rank: u32, orders: UnixStream },
    /// Its command has ended; all that it wrote was shown.
    Ended { rank: u32, end: End },
    /// What was started first has ended, and is to be reaped: by its place.
    Started { place: usize },
    /// A signal has come to the launcher.
    Signal(i32),
}

/// What has happened, and in which attempt; a signal is of none.
#[derive(Debug)]
pub(super) struct News {
    pub(super) attempt: Option<u32>,
    pub(super) event: Event,
}

/// The place to which attendants connect.
#[derive(Debug)]
pub(super) struct Ranks {
    folder: TempDir,
}

/// How long an attendant may take to say whose it is, or to read an order.
const PATIENCE: Duration = Duration::from_secs(10);

const SOCKET: &str = "ranks.sock";

impl Ranks {
    /// Listens in a folder that only this user may enter.
    ///
    /// # Errors
    /// In words.
    pub(super) fn listen(events: &Sender<News>, terminal: &Arc<Terminal>) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("hsdp-").tempdir();
        let folder = folder.map_err(|error| format!("no folder for a socket: {error}"))?;
        let path = folder.path().join(SOCKET);
        let listener = UnixListener::bind(&path)
            .map_err(|error| format!("cannot listen at {}: {error}", path.display()))?;
        let (events, terminal) = (events.clone(), Arc::clone(terminal));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (events, terminal) = (events.clone(), Arc::clone(&terminal));
                thread::spawn(move || {
                    // Who goes wrong before it has said who it is, is told of by what started it.
                    let _ = hear(stream, &events, &terminal);
                });
            }
        });
        Ok(Self { folder })
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }
}

/// One attendant, from its first word to its last.
fn hear(stream: UnixStream, events: &Sender<News>, terminal: &Terminal) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut from = BufReader::new(stream.try_clone()?);
    let Frame::Hello { attempt, rank } = Frame::read_from(&mut from)? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    stream.set_read_timeout(None)?;
    let tell = |event| {
        let _ = events.send(News { attempt: Some(attempt), event });
    };
    tell(Event::Joined { rank, orders: stream });
    let who = rank.to_string();
    let end = loop {
        match Frame::read_from(&mut from) {
            Ok(Frame::Line(stream, line)) => terminal.line(&who, stream, &line),
            Ok(Frame::Ended(end)) => break end,
            Ok(Frame::Hello { .. }) | Err(_) => break End::LOST,
        }
    };
    tell(Event::Ended { rank, end });
    Ok(())
}
