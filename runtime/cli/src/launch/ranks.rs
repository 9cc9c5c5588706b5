//! The messages that attendants send to the launcher.

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

/// An event of a job.
#[derive(Debug)]
pub(super) enum Event {
    /// A rank's attendant has connected, and takes orders.
    Joined { rank: u32, orders: UnixStream },
    /// A rank's command has ended. All lines that it wrote were shown.
    Ended { rank: u32, end: End },
    /// A process that the launcher started has ended, and must be reaped. `place` is its index among those processes.
    Started { place: usize },
    /// The launcher has got a signal.
    Signal(i32),
}

/// An event, and the attempt in which it happened; `None` for a signal.
#[derive(Debug)]
pub(super) struct News {
    pub(super) attempt: Option<u32>,
    pub(super) event: Event,
}

/// The socket to which attendants connect, in a folder of its own.
#[derive(Debug)]
pub(super) struct Ranks {
    folder: TempDir,
}

/// How long an attendant may take to name its rank, or to read an order.
const PATIENCE: Duration = Duration::from_secs(10);

const SOCKET: &str = "ranks.sock";

impl Ranks {
    /// Listens in a folder that only this user may enter.
    ///
    /// # Errors
    /// In words.
    pub(super) fn listen(events: &Sender<News>, terminal: &Arc<Terminal>) -> Result<Self, String> {
        let folder = tempfile::Builder::new().prefix("hsdp-").tempdir();
        let folder =
            folder.map_err(|error| format!("cannot make a folder for the socket: {error}"))?;
        let path = folder.path().join(SOCKET);
        let listener = UnixListener::bind(&path)
            .map_err(|error| format!("cannot listen at {}: {error}", path.display()))?;
        let (events, terminal) = (events.clone(), Arc::clone(terminal));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (events, terminal) = (events.clone(), Arc::clone(&terminal));
                thread::spawn(move || {
                    // If an attendant fails before it names its rank, the end of its process reports the failure.
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

/// Receives the frames of one attendant, from the first to the last.
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
