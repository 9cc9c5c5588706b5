//! `hsdp launch-rank`: has the command of one rank, and tells the launcher what becomes of it.

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::end::End;
use super::frame::{Frame, Order, Stream};
use super::replace::{self, split};
use super::{environment, lines};
use crate::outcome::Outcome;

/// The command of a rank.
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// How long the pipes of a command that has ended may stay open: somebody who left its group may have them.
const DRAINING: Duration = Duration::from_secs(2);

/// The command's process group, as long as its number is its own.
type Group = Arc<Mutex<Option<Pid>>>;

/// The way to the launcher, for whole frames only.
type Words = Arc<Mutex<UnixStream>>;

/// Runs it to its end. Who ended badly stays until the launcher lets it go, so that mpirun does not act before the launcher.
pub(crate) fn run(options: &Options) -> Result<Outcome, Box<dyn Error>> {
    let (rank, attempt) = environment::place()?;
    let socket = env::var_os(environment::SOCKET);
    let socket = socket.ok_or_else(|| format!("{} is not set", environment::SOCKET))?;
    let socket = PathBuf::from(socket);
    let launcher = UnixStream::connect(&socket)?;
    Frame::Hello { attempt, rank }.write_to(&launcher)?;
    let mut child = start(&options.command)?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let group: Group = Arc::new(Mutex::new(Some(pid)));
    pass_on_signals(&group)?;
    let dismissed = obey((launcher.try_clone()?, socket), &group);
    let words: Words = Arc::new(Mutex::new(launcher));
    let drained = pump(&mut child, &words);
    let end = bury(&mut child, &group)?;
    // Nobody sends: it ends when the pumps do.
    let _ = drained.recv_timeout(DRAINING);
    // Where the launcher is gone, there is nobody to tell.
    let told = say(&words, &Frame::Ended(end));
    if end.is_bad() && told.is_ok() {
        let _ = dismissed.recv();
    }
    Ok(Outcome::Ended(end.exit_code()))
}

fn start(command: &[OsString]) -> Result<Child, Box<dyn Error>> {
    let (program, arguments) = split(command)?;
    let mut command = replace::command(Path::new(program), arguments)?;
    command
        .env_remove(environment::SOCKET)
        .env_remove(environment::LAUNCHED)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    Ok(command.spawn()?)
}

/// Sends all lines that it writes; the receiver ends when nothing more comes.
fn pump(child: &mut Child, words: &Words) -> Receiver<()> {
    let (open, drained) = mpsc::channel();
    let pipe = |stream, pipe: Option<Box<dyn Read + Send>>| pipe.map(|pipe| (stream, pipe));
    let stdout = child.stdout.take().map(|it| Box::new(it) as _);
    let stderr = child.stderr.take().map(|it| Box::new(it) as _);
    let pipes = [pipe(Stream::Stdout, stdout), pipe(Stream::Stderr, stderr)];
    for (stream, from) in pipes.into_iter().flatten() {
        let (words, open) = (Arc::clone(words), open.clone());
        thread::spawn(move || {
            // Where the launcher is gone, the group is killed.
            let _ = lines::each(from, |line| say(&words, &Frame::Line(stream, line)));
            drop(open);
        });
    }
    drained
}

fn say(words: &Words, frame: &Frame) -> io::Result<()> {
    frame.write_to(&*words.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Does what the launcher asks for; where it is gone, so is the command. The receiver ends with that, or when it lets this process go.
fn obey((launcher, socket): (UnixStream, PathBuf), group: &Group) -> Receiver<()> {
    let (serving, dismissed) = mpsc::channel::<()>();
    let group = Arc::clone(group);
    thread::spawn(move || {
        let _serving = serving;
        loop {
            match Order::read_from(&launcher) {
                Ok(Order::Signal(signal)) => send(&group, signal),
                Ok(Order::Leave) => return,
                Err(_) => {
                    send(&group, Signal::SIGKILL as i32);
                    return tidy(&socket);
                }
            }
        }
    });
    dismissed
}

/// Removes what a launcher that was killed has left: its socket, and the folder that has nothing else.
fn tidy(socket: &Path) {
    let _ = fs::remove_file(socket);
    let _ = socket.parent().map(fs::remove_dir);
}

/// What mpirun sends, or anybody else.
fn pass_on_signals(group: &Group) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let group = Arc::clone(group);
    thread::Builder::new().spawn(move || {
        for signal in signals.forever() {
            send(&group, signal);
        }
    })?;
    Ok(())
}

fn send(group: &Group, signal: i32) {
    let group = group.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(group), Ok(signal)) = (*group, Signal::try_from(signal)) {
        // Whoever is not there any more needs none.
        let _ = killpg(group, signal);
    }
}

/// Waits for its end, and kills what it has left in its group.
fn bury(child: &mut Child, group: &Group) -> Result<End, Box<dyn Error>> {
    let pid = *group.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = pid.ok_or("its number was given up")?;
    let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    while let Err(nix::Error::EINTR) = waitid(Id::Pid(pid), flags) {}
    send(group, Signal::SIGKILL as i32);
    group.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(End::of(child.wait()?))
}
