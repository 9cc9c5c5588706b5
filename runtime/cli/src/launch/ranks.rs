//! Receives the messages of attendants.

use std::collections::HashSet;
use std::fs::Permissions;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::Uid;
use tempfile::TempDir;

use super::frame::{AttendantFrame, LauncherOrder, receive, send};
use super::start_thread;
use super::supervisor::ProcessEnd;
use super::terminal::{Credit, LineSource, Terminal};

/// An event of a job.
#[derive(Debug)]
pub(super) enum JobEvent {
    /// A rank's attendant has connected, and accepts orders.
    Joined { rank: u32, orders: Arc<UnixStream> },
    /// A rank's command has ended. Lines that it has written may follow.
    Ended { rank: u32, end: ProcessEnd },
    /// All lines of a rank have arrived. `end` is the end of its command.
    Drained { rank: u32, end: ProcessEnd },
    /// A process that the launcher started has ended, and must be reaped. `place` is its index
    /// among those processes.
    Started { place: usize },
    /// The launcher has received a signal.
    Signal(i32),
}

/// An event, and the attempt in which it happened. `None` for a signal.
#[derive(Debug)]
pub(super) struct News {
    pub(super) attempt: Option<u32>,
    pub(super) event: JobEvent,
}

/// Socket that attendants connect to, in a folder of its own.
#[derive(Debug)]
pub(super) struct AttendantSocket {
    folder: TempDir,
    claims: Arc<Mutex<Claims>>,
}

/// Time that an attendant has to name its rank, or to read an order.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pause after a connection that could not be accepted, for example because other processes hold
/// all open files that the system permits.
const PAUSE: Duration = Duration::from_millis(20);

const SOCKET_NAME: &str = "ranks.sock";

impl AttendantSocket {
    /// Listens in a folder that only this user may enter, from its creation on.
    ///
    /// # Errors
    /// A text.
    pub(super) fn listen(events: &Sender<News>, terminal: &Arc<Terminal>) -> Result<Self, String> {
        let private = Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix("hsdp-").permissions(private).tempdir();
        let folder =
            folder.map_err(|error| format!("cannot make a folder for the socket: {error}"))?;
        let path = folder.path().join(SOCKET_NAME);
        let listener = UnixListener::bind(&path)
            .map_err(|error| format!("cannot listen at {}: {error}", path.display()))?;
        let claims = Arc::<Mutex<Claims>>::default();
        let reception = Reception {
            events: events.clone(),
            terminal: Arc::clone(terminal),
            claims: Arc::clone(&claims),
        };
        start_thread(move || reception.accept(&listener)).map_err(|error| error.to_string())?;
        Ok(Self { folder, claims })
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET_NAME)
    }

    /// Starts to accept claims to the ranks of this attempt.
    pub(super) fn begin(&self, attempt: u32, ranks: u32) {
        *locked(&self.claims) = Claims::of(attempt, ranks);
    }
}

/// State that the threads of the connections share.
#[derive(Clone)]
struct Reception {
    events: Sender<News>,
    terminal: Arc<Terminal>,
    claims: Arc<Mutex<Claims>>,
}

impl Reception {
    fn accept(&self, listener: &UnixListener) {
        let mut has_told = false;
        for stream in listener.incoming() {
            let stream = match stream {
                Ok(stream) => stream,
                Err(error) => {
                    if !has_told {
                        let text = "a connection to the launcher cannot be accepted";
                        self.terminal.say(&format!("{text}: {error}"));
                    }
                    has_told = true;
                    thread::park_timeout(PAUSE);
                    continue;
                }
            };
            let reception = self.clone();
            // If the system has no thread for it, the connection ends, and the attendant with it.
            let _ = start_thread(move || {
                // If an attendant fails before it names its rank, the end of its process reports
                // the failure.
                let _ = reception.hear(stream);
            });
        }
    }

    /// Receives the frames of one attendant, from the first to the last.
    fn hear(&self, stream: UnixStream) -> io::Result<()> {
        if let Err(refused) = check_peer(&stream) {
            self.terminal.say(&format!("a connection to the launcher is refused: {refused}"));
            return Err(refused);
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        // Shared rather than cloned: a clone would be a second open file for each rank.
        let stream = Arc::new(stream);
        let mut from = BufReader::new(&*stream);
        let AttendantFrame::Hello { attempt, rank } = receive(&mut from)? else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let claimed = locked(&self.claims).take(attempt, rank);
        if let Err(refused) = claimed {
            self.terminal.say(&format!("a process that claims rank {rank} is refused: {refused}"));
            return send(&*stream, &LauncherOrder::Refuse);
        }
        send(&*stream, &LauncherOrder::Begin)?;
        stream.set_read_timeout(None)?;
        let tell = |event| {
            let _ = self.events.send(News { attempt: Some(attempt), event });
        };
        tell(JobEvent::Joined { rank, orders: Arc::clone(&stream) });
        let shown = ShownRank { who: rank.to_string(), credit: Arc::new(Credit::of(&stream)) };
        let end = self.show(&shown, &mut from).unwrap_or(ProcessEnd::LOST);
        tell(JobEvent::Ended { rank, end });
        // A lost attendant sends no further lines.
        while self.show(&shown, &mut from).is_some() {}
        tell(JobEvent::Drained { rank, end });
        Ok(())
    }

    /// Shows the lines of a rank, until its command has ended. `None` if no frame follows.
    fn show(&self, of: &ShownRank, mut from: impl Read) -> Option<ProcessEnd> {
        loop {
            match receive(&mut from) {
                Ok(AttendantFrame::Line(stream, line)) => {
                    let from = LineSource::Rank(Arc::clone(&of.credit));
                    self.terminal.line(&of.who, from, stream, &line);
                }
                Ok(AttendantFrame::Ended(end)) => return Some(end),
                Ok(AttendantFrame::Hello { .. } | AttendantFrame::Drained) | Err(_) => return None,
            }
        }
    }
}

/// A rank whose lines are shown.
struct ShownRank {
    who: String,
    credit: Arc<Credit>,
}

fn locked(claims: &Mutex<Claims>) -> MutexGuard<'_, Claims> {
    claims.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Claims of the current attempt. The first claimant of a rank keeps it, even if it fails.
#[derive(Debug, Default)]
pub(super) struct Claims {
    attempt: u32,
    ranks: u32,
    taken: HashSet<u32>,
}

impl Claims {
    /// Returns the claims at the start of an attempt.
    pub(super) fn of(attempt: u32, ranks: u32) -> Self {
        Self { attempt, ranks, taken: HashSet::new() }
    }

    /// Claims a rank.
    ///
    /// # Errors
    /// A text, if the rank is not free in the current attempt.
    pub(super) fn take(&mut self, attempt: u32, rank: u32) -> Result<(), String> {
        if attempt != self.attempt {
            return Err(format!("attempt {attempt} is over, or not begun"));
        }
        if rank >= self.ranks {
            return Err(format!("the job has {} ranks", self.ranks));
        }
        if !self.taken.insert(rank) {
            return Err("another process runs the rank".to_owned());
        }
        Ok(())
    }
}

/// Refuses a connection of another user, because a process that may send frames or orders can end
/// the job's processes.
///
/// # Errors
/// `PermissionDenied`, with both users; the error of the system.
pub(super) fn check_peer(stream: &UnixStream) -> io::Result<()> {
    let other = Uid::from_raw(getsockopt(stream, PeerCredentials)?.uid());
    let own = Uid::effective();
    if other == own {
        return Ok(());
    }
    let text =
        format!("its other end is a process of user {other}, and this process runs as user {own}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_claimant_keeps_its_rank() {
        let mut claims = Claims::of(1, 2);
        assert_eq!(claims.take(1, 0), Ok(()));
        assert_eq!(claims.take(1, 0), Err("another process runs the rank".to_owned()));
        assert_eq!(claims.take(1, 2), Err("the job has 2 ranks".to_owned()));
        for attempt in [0, 2] {
            let refused = format!("attempt {attempt} is over, or not begun");
            assert_eq!(claims.take(attempt, 1), Err(refused));
        }
        assert_eq!(claims.take(1, 1), Ok(()));
    }
}
