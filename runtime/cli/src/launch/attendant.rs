//! `hsdp launch-rank`: runs the command of one rank, and reports its output and its end to the
//! launcher.

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;
use std::{env, fs};

use clap::Args;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use signal_hook::iterator::Signals;

use super::frame::{
    AttendantFrame, LauncherOrder, LineWindow, await_end, cost, each_line, pipes_of, receive, send,
};
use super::job::{LAUNCHED, SOCKET, mortal, own_rank};
use super::ranks::check_peer;
use super::supervisor::ProcessEnd;
use super::{FORWARDED, REFUSED, start_thread};
use crate::CommandOutcome;

/// Options of `hsdp launch-rank`.
#[derive(Args, Debug)]
pub(crate) struct RankArgs {
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Time that the launcher has to answer a claim.
const ANSWER: Duration = Duration::from_secs(120);

/// Process group of the command, as long as its number is valid.
type CommandGroup = Arc<Mutex<Option<Pid>>>;

/// Socket to the launcher. The lock keeps frames whole.
pub(super) type LauncherSocket = Arc<Mutex<UnixStream>>;

/// Time for which a command's last lines are sent before the command's end is reported.
const LINES_FIRST: Duration = Duration::from_millis(500);

/// Time that a message on stderr may take.
const MESSAGE: Duration = Duration::from_secs(2);

/// Runs the command to its end. Prints an error here, because stderr belongs to the launcher and
/// its reader may block.
pub(crate) fn run(options: &RankArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    attend(options).or_else(|error| {
        hsdp_train::tell_within("hsdp", &error, MESSAGE);
        Ok(CommandOutcome::Ended(REFUSED))
    })
}

/// Runs the command, and stays until the launcher permits this process to end. So the launcher
/// learns of the end of the rank before mpirun does, and acts on it first.
fn attend(options: &RankArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let (rank, attempt) = own_rank()?;
    let socket = env::var_os(SOCKET);
    let socket = socket.ok_or_else(|| format!("{} is not set", SOCKET))?;
    let socket = PathBuf::from(socket);
    let launcher = claim(&socket, attempt, rank)?;
    let mut child = start(&options.command)?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let group: CommandGroup = Arc::new(Mutex::new(Some(pid)));
    pass_on_signals(&group)?;
    let window = Arc::new(LineWindow::new());
    let orders = launcher.try_clone()?;
    let dismissed = obey(orders, socket, Arc::clone(&group), Arc::clone(&window))?;
    let words: LauncherSocket = Arc::new(Mutex::new(launcher));
    let pipes = Pipes::of(&mut child, &words, &window)?;
    let end = bury(&mut child, pid, &group)?;
    // The launcher prints its message about the end below the last lines, unless their reader
    // blocks.
    let is_drained = pipes.wait_shortly(LINES_FIRST);
    // If the launcher has died, a frame cannot be sent, and there is no reason to wait.
    let mut sent = say(&words, &AttendantFrame::Ended(end));
    if !is_drained {
        pipes.wait_for_lines();
    }
    sent = sent.and_then(|()| say(&words, &AttendantFrame::Drained));
    if sent.is_ok() {
        let _ = dismissed.recv();
    }
    Ok(CommandOutcome::Ended(end.exit_code()))
}

/// Connects to the launcher, and claims the rank. The command runs only after the launcher has
/// agreed: two commands of one rank would write to the same files.
///
/// # Errors
/// A text, if the rank belongs to another process, or the launcher does not answer.
fn claim(socket: &Path, attempt: u32, rank: u32) -> Result<UnixStream, Box<dyn Error>> {
    let place = socket.display();
    let failed =
        |error: io::Error| format!("rank {rank} cannot reach the launcher at {place}: {error}");
    let launcher = UnixStream::connect(socket).map_err(failed)?;
    check_peer(&launcher).map_err(failed)?;
    launcher.set_read_timeout(Some(ANSWER))?;
    send(&launcher, &AttendantFrame::Hello { attempt, rank }).map_err(failed)?;
    let answer = receive(&launcher).map_err(failed)?;
    launcher.set_read_timeout(None)?;
    match answer {
        LauncherOrder::Begin => Ok(launcher),
        _ => Err(format!(
            "the launcher has refused this process as rank {rank} of attempt {attempt}"
        )
        .into()),
    }
}

/// Starts a command, which has at least a program.
fn start(command: &[OsString]) -> io::Result<Child> {
    mortal(Path::new(&command[0]), &command[1..])?
        .env_remove(SOCKET)
        .env_remove(LAUNCHED)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
}

/// Sends a frame. Waits until the launcher reads it.
pub(super) fn say(words: &LauncherSocket, frame: &AttendantFrame) -> io::Result<()> {
    send(&*words.lock().unwrap_or_else(PoisonError::into_inner), frame)
}

/// Carries out the orders of the launcher. If the launcher has died, kills the command. The channel
/// closes after that, or when the launcher permits this process to end.
fn obey(
    launcher: UnixStream,
    socket: PathBuf,
    group: CommandGroup,
    window: Arc<LineWindow>,
) -> io::Result<Receiver<()>> {
    let (serving, dismissed) = mpsc::channel::<()>();
    start_thread(move || {
        let _serving = serving;
        loop {
            match receive(&launcher) {
                Ok(LauncherOrder::Signal(signal)) => signal_group(&group, signal),
                Ok(LauncherOrder::Taken(bytes)) => window.give(bytes as usize),
                // The launcher sends `Begin` and `Refuse` only before the command runs.
                Ok(LauncherOrder::Begin | LauncherOrder::Refuse | LauncherOrder::Leave) => {
                    return window.close();
                }
                Err(_) => {
                    signal_group(&group, Signal::SIGKILL as i32);
                    window.close();
                    return tidy(&socket);
                }
            }
        }
    })?;
    Ok(dismissed)
}

/// Removes the socket of a launcher that was killed, and the socket's folder.
fn tidy(socket: &Path) {
    let _ = fs::remove_file(socket);
    let _ = socket.parent().map(fs::remove_dir);
}

/// Passes the signals that this process gets, from mpirun or from others, on to the command's
/// group.
fn pass_on_signals(group: &CommandGroup) -> io::Result<()> {
    let mut signals = Signals::new(FORWARDED)?;
    let group = Arc::clone(group);
    start_thread(move || {
        for signal in signals.forever() {
            signal_group(&group, signal);
        }
    })
}

fn signal_group(group: &CommandGroup, signal: i32) {
    let group = group.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(group), Ok(signal)) = (*group, Signal::try_from(signal)) {
        // A group that has ended needs no signal.
        let _ = killpg(group, signal);
    }
}

/// Waits for the end of the command, and kills the processes that it has left in its group.
fn bury(child: &mut Child, pid: Pid, group: &CommandGroup) -> io::Result<ProcessEnd> {
    await_end(pid);
    signal_group(group, Signal::SIGKILL as i32);
    group.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(ProcessEnd::of(child.wait()?))
}

/// Time that the pipes of a command that has ended may stay open and empty. A process that left the
/// command's group may still hold them.
const DRAINING: Duration = Duration::from_secs(2);

/// Interval between checks of the pipes of a command that has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Threads that read the pipes of a command.
pub(super) struct Pipes {
    /// Channel without messages. It closes when the threads end.
    drained: Receiver<()>,
    /// Number of threads that are sending a line. The others read.
    sending: Arc<AtomicUsize>,
}

impl Pipes {
    /// Sends all lines that the command writes, while the window has room for them.
    pub(super) fn of(
        child: &mut Child,
        words: &LauncherSocket,
        window: &Arc<LineWindow>,
    ) -> io::Result<Self> {
        let (open, drained) = mpsc::channel::<()>();
        let sending = Arc::<AtomicUsize>::default();
        for (stream, from) in pipes_of(child) {
            let words = Arc::clone(words);
            let open = open.clone();
            let sending = Arc::clone(&sending);
            let window = Arc::clone(window);
            start_thread(move || {
                // If the launcher has died, the group is killed.
                let _ = each_line(from, |line| {
                    sending.fetch_add(1, Ordering::Relaxed);
                    let sent = match window.take(cost(&line)) {
                        true => say(&words, &AttendantFrame::Line(stream, line)),
                        false => Err(io::ErrorKind::BrokenPipe.into()),
                    };
                    sending.fetch_sub(1, Ordering::Relaxed);
                    sent
                });
                drop(open);
            })?;
        }
        Ok(Self { drained, sending })
    }

    /// Waits up to `most` until all lines of a command that has ended are sent. Returns whether
    /// they are.
    fn wait_shortly(&self, most: Duration) -> bool {
        self.drained.recv_timeout(most) == Err(RecvTimeoutError::Disconnected)
    }

    /// Waits until all lines of a command that has ended are sent.
    ///
    /// While a thread sends, lines of the command may still be in its pipe, even if the reader of
    /// the launcher's output blocks for long. So only the time counts in which all threads wait for
    /// bytes that only a process left behind could write.
    fn wait_for_lines(self) {
        let mut empty = Duration::ZERO;
        while empty < DRAINING {
            match self.drained.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if self.sending.load(Ordering::Relaxed) == 0 => {
                    empty += LOOK;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}
