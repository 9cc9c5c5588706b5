//! Processes that claim a rank of another process, and processes of other users.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

use nix::unistd::Uid;
use tempfile::TempDir;

use crate::job::{self, Job, NCCL, PATIENCE, command};
use crate::mpirun::copy_program;
use crate::program::Said;

/// A user that owns nothing.
const NOBODY: u32 = 65534;

/// A job of two ranks that ends when the file `go` exists, and the folder of its temporary files.
/// New files and folders of the launcher get all the modes that it asks for.
struct Waiting {
    folder: TempDir,
    job: Job,
}

impl Waiting {
    fn start() -> Self {
        Self::within("umask 000; exec \"$@\"")
    }

    /// Starts the job by a script of `sh` in the job's folder.
    fn within(shell: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("set");
        let script = format!(
            "echo up; until [ -e {}/go ]; do sleep 0.02; done; echo done",
            folder.path().display()
        );
        let launch = command(&[&NCCL[..], &["-n", "2", "--", "sh", "-c", &script]].concat());
        let mut open = job::in_shell(shell, &launch);
        open.env("TMPDIR", folder.path()).current_dir(folder.path());
        let mut job = Job::spawn(open);
        assert_eq!(job.lines(2), ["[0] up\n", "[1] up\n"]);
        Self { folder, job }
    }

    fn socket(&self) -> PathBuf {
        let files = fs::read_dir(self.folder.path()).expect("a folder").flatten();
        let mut sockets = files.map(|file| file.path().join("ranks.sock"));
        sockets.find(|socket| socket.exists()).expect("the launcher's folder")
    }

    /// Returns a process that claims a rank, and prints "here" if its command runs.
    fn claimant(&self, attempt: u32, rank: u32) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hsdp"));
        command.args(["launch-rank", "--", "sh", "-c", "echo here"]);
        command.env("HSDP_LAUNCH_SOCKET", self.socket());
        command.env("HSDP_RESTART", attempt.to_string()).env("HSDP_LAUNCH_RANK", rank.to_string());
        command
    }

    /// Lets the ranks end, and returns the end of the job. No claimant has removed the socket.
    fn end(self) -> Said {
        self.socket();
        fs::write(self.folder.path().join("go"), "").expect("written");
        self.job.ended()
    }
}

fn text(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn is_well(said: &str) {
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] done", "[1] done"]);
}

#[test]
fn the_socket_is_in_a_folder_that_only_its_user_may_enter() {
    let waiting = Waiting::start();
    let socket = waiting.socket();
    let folder = fs::metadata(socket.parent().expect("a folder")).expect("it is there");
    assert_eq!(folder.permissions().mode() & 0o7777, 0o700, "whatever the umask is");
    assert_eq!(waiting.end().0, Some(0));
}

#[test]
fn a_second_claimant_is_refused_and_the_rank_and_the_job_go_on() {
    let waiting = Waiting::start();
    let mut expected = String::new();
    for (attempt, rank, because) in [
        (0, 0, "another process runs the rank"),
        (0, 1, "another process runs the rank"),
        (0, 2, "the job has 2 ranks"),
        (7, 0, "attempt 7 is over, or not begun"),
    ] {
        let output = waiting.claimant(attempt, rank).output().expect("it starts");
        let refused = format!(
            "hsdp: the launcher has refused this process as rank {rank} of attempt {attempt}\n"
        );
        assert_eq!((text(&output), &*output.stdout), ((Some(2), refused), &b""[..]));
        expected += &format!("hsdp: a process that claims rank {rank} is refused: {because}\n");
    }
    let (code, said, told) = waiting.end();
    assert_eq!((code, told), (Some(0), expected));
    is_well(&said);
}

#[test]
fn another_user_cannot_reach_the_launcher() {
    if !Uid::effective().is_root() {
        return crate::mpi::skipped("root, to act as another user");
    }
    let waiting = Waiting::start();
    let program = waiting.folder.path().join("hsdp");
    copy_program(Path::new(env!("CARGO_BIN_EXE_hsdp")), &program);
    let claims = |program: &Path| {
        let claimant = waiting.claimant(0, 0);
        let mut other = Command::new(program);
        other.args(claimant.get_args()).uid(NOBODY).gid(NOBODY);
        other.envs(claimant.get_envs().filter_map(|(name, value)| Some((name, value?))));
        text(&other.output().expect("it starts"))
    };
    let (code, told) = claims(&program);
    assert_eq!(code, Some(2), "{told}");
    assert!(told.ends_with("Permission denied (os error 13)\n"), "{told}");
    // Even if the folder were open, the launcher would ask for the user.
    let socket = waiting.socket();
    for open in [socket.parent().expect("a folder"), &socket] {
        fs::set_permissions(open, Permissions::from_mode(0o777)).expect("set");
    }
    let (code, told) = claims(&program);
    assert_eq!(code, Some(2), "{told}");
    fs::remove_file(program).expect("removed");
    let (code, said, told) = waiting.end();
    let expected = format!(
        "hsdp: a connection to the launcher is refused: its other end is a process of user {NOBODY}, and this process runs as user 0\n"
    );
    assert_eq!((code, told), (Some(0), expected));
    is_well(&said);
}

#[test]
fn junk_on_the_socket_disturbs_no_rank() {
    use std::io::Write as _;

    let waiting = Waiting::start();
    let mut silent = Vec::new();
    for junk in [
        &b""[..],
        b"H",
        b"H\x08\0\0\0",
        b"o\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 70_000],
    ] {
        for _ in 0..50 {
            let mut stream = UnixStream::connect(waiting.socket()).expect("it listens");
            // The launcher may have closed it already.
            let _ = stream.write_all(junk);
            silent.push(stream);
        }
    }
    let (code, said, told) = waiting.end();
    assert_eq!((code, &*told), (Some(0), ""));
    is_well(&said);
}

/// Idle connections take all files that the launcher may open.
#[test]
fn a_connection_that_cannot_be_accepted_is_told_once_and_the_job_goes_on() {
    const FILES: usize = 40;
    let waiting = Waiting::within(&format!("ulimit -n {FILES}; exec \"$@\" 2> told"));
    let told = waiting.folder.path().join("told");
    let socket = waiting.socket();
    let idle = (0..FILES).map(|_| UnixStream::connect(&socket).expect("it listens"));
    let idle: Vec<UnixStream> = idle.collect();
    let began = Instant::now();
    while !fs::read_to_string(&told).expect("there").ends_with('\n') {
        assert!(began.elapsed() < PATIENCE, "nothing is told");
        std::thread::yield_now();
    }
    drop(idle);
    let told = fs::read_to_string(told).expect("there");
    let expected = "hsdp: a connection to the launcher cannot be accepted: Too many open files (os error 24)\n";
    assert_eq!(told, expected);
    let (code, said, _) = waiting.end();
    assert_eq!(code, Some(0));
    is_well(&said);
}
