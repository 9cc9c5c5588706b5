//! Four machines, made of network namespaces with addresses of their own, and training across them
//! over TCP. This needs root, iproute2, and, for a line that loses packets, a kernel with netem.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use tempfile::TempDir;

use crate::Named;
use crate::job::{Family, Job, ON_TEXT, family, has, mpirun, run, train_gpt};
use crate::training::{losses, of_threads};

pub(crate) const TRIALS: &[Named] = &[
    ("hosts::four_hosts_have_the_losses_of_four_threads", across_hosts),
    ("hosts::a_line_that_is_cut_is_named_by_the_deadline", cut),
];

pub(crate) const ON_A_BAD_LINE: Named =
    ("hosts::a_line_that_is_slow_and_loses_packets_changes_nothing", over_a_bad_line);

/// Why none of these can be shown here, if so.
pub(crate) fn lacks() -> Option<&'static str> {
    if !works(Command::new("ip").arg("-V")) {
        return Some("no iproute2");
    }
    let name = format!("hsdp-try-{}", process::id());
    let made = works(Command::new("ip").args(["netns", "add", &name]));
    let _ = Command::new("ip").args(["netns", "del", &name]).output();
    (!made).then_some("no right to make network namespaces")
}

/// Why no line can be made bad here, if so.
pub(crate) fn lacks_netem() -> Option<&'static str> {
    let name = format!("hsdp-try-{}", process::id());
    let ip = |arguments: &[&str]| works(Command::new("ip").args(arguments));
    let netem = ["-n", &name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"];
    let made = ip(&["netns", "add", &name]) && works(Command::new("tc").args(netem));
    let _ = ip(&["netns", "del", &name]);
    (!made).then_some("no netem in this kernel")
}

fn works(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Hosts on one switch, gone when dropped.
struct Hosts {
    /// Of this process, so that two runs do not meet.
    mark: u32,
    folder: TempDir,
}

const HOSTS: [u8; 4] = [1, 2, 3, 4];

impl Hosts {
    fn new() -> Result<Self, String> {
        let folder = TempDir::new().map_err(|error| error.to_string())?;
        let hosts = Self { mark: process::id() % 10_000, folder };
        let switch = hosts.switch();
        ip(&["link", "add", &switch, "type", "bridge"])?;
        ip(&["link", "set", &switch, "up"])?;
        for host in HOSTS {
            let name = hosts.name(host);
            let line = hosts.line(host);
            fs::create_dir(hosts.files(host)).map_err(|error| error.to_string())?;
            ip(&["netns", "add", &name])?;
            ip(&["link", "add", &line, "type", "veth", "peer", "name", "eth0", "netns", &name])?;
            ip(&["link", "set", &line, "master", &switch])?;
            ip(&["link", "set", &line, "up"])?;
            let address = format!("{}/24", address(host));
            ip(&["-n", &name, "addr", "add", &address, "dev", "eth0"])?;
            ip(&["-n", &name, "link", "set", "eth0", "up"])?;
            ip(&["-n", &name, "link", "set", "lo", "up"])?;
        }
        // mpirun calls it, instead of ssh, to start something on a host.
        let agent = hosts.agent();
        let name = hosts.name(0);
        let name = name.trim_end_matches('0');
        let files = hosts.folder.path().display();
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = -x ] && shift\nhost=${{1##*.}}\nshift\nexport TMPDIR={files}/$host\n\
             exec ip netns exec {name}$host sh -c \"$*\"\n"
        );
        fs::write(&agent, script).map_err(|error| error.to_string())?;
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&agent, executable).map_err(|error| error.to_string())?;
        Ok(hosts)
    }

    fn switch(&self) -> String {
        format!("hsdp{}", self.mark)
    }

    fn name(&self, host: u8) -> String {
        format!("hsdp{}-{host}", self.mark)
    }

    fn line(&self, host: u8) -> String {
        format!("hsdp{}v{host}", self.mark)
    }

    /// The folder of a host's temporary files, as machines have one each. In a common one, a daemon
    /// of Open MPI 4.1.4 fails at times while others start there, and mpirun waits for it: 13 of
    /// 200 starts, and none of 600 with a folder each.
    fn files(&self, host: u8) -> PathBuf {
        self.folder.path().join(host.to_string())
    }

    fn agent(&self) -> PathBuf {
        self.folder.path().join("agent")
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Training on all of them, started from the first.
    fn train(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(1), "mpirun"]);
        for (name, value) in mpirun().get_envs() {
            command.envs(value.map(|value| (name, value)));
        }
        match family() {
            Some(Family::Mpich) => self.by_mpich(&mut command),
            _ => self.by_open_mpi(&mut command),
        }
        command.env("TMPDIR", self.files(1));
        command.args(["-n", "4"]);
        command
            .arg(train_gpt())
            .args(["--comm", "mpi", "--mesh", "2x2", "--layers", "2"])
            .args(ON_TEXT)
            .args(arguments);
        command.arg("--out").arg(self.out());
        command
    }

    fn by_open_mpi(&self, command: &mut Command) {
        let network = "10.77.0.0/24";
        command.args(["--mca", "plm_rsh_agent"]).arg(self.agent());
        command.args(["--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "btl", "tcp,self"]);
        command.args(["--mca", "btl_tcp_if_include", network]);
        command.args(["--mca", "oob_tcp_if_include", network]);
        command.args(["--host", &HOSTS.map(address).join(","), "-x", "RAYON_NUM_THREADS"]);
    }

    fn by_mpich(&self, command: &mut Command) {
        command.args(["-launcher", "ssh", "-launcher-exec"]).arg(self.agent());
        command.args(["-localhost", &address(1), "-hosts", &HOSTS.map(address).join(",")]);
        // Else the ranks would find that they share memory.
        command.env("UCX_TLS", "tcp,self").env("UCX_NET_DEVICES", "eth0");
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in HOSTS {
            let _ = ip(&["netns", "del", &self.name(host)]);
            // With its namespace, if it was made that far.
            let _ = ip(&["link", "del", &self.line(host)]);
        }
        let _ = ip(&["link", "del", &self.switch()]);
    }
}

fn address(host: u8) -> String {
    format!("10.77.0.{host}")
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr)))
}

fn equals_threads(hosts: &Hosts) -> Result<(), String> {
    let ended = run(hosts.train(&["--steps", "6"]))?;
    if ended.code != Some(0) {
        return Err(format!("exit code {:?}: {}", ended.code, ended.err));
    }
    let by_hosts = losses(&hosts.out())?;
    let by_threads = of_threads(&hosts.folder.path().join("threads"))?;
    if by_hosts == by_threads { Ok(()) } else { Err(format!("{by_hosts:?}\n{by_threads:?}")) }
}

fn across_hosts() -> Result<(), String> {
    equals_threads(&Hosts::new()?)
}

fn over_a_bad_line() -> Result<(), String> {
    let hosts = Hosts::new()?;
    let name = hosts.name(2);
    let netem =
        ["-n", &name, "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "1ms", "loss", "1%"];
    if !works(Command::new("tc").args(netem)) {
        return Err("tc adds no netem".to_owned());
    }
    equals_threads(&hosts)
}

fn cut() -> Result<(), String> {
    let hosts = Hosts::new()?;
    let job = Job::start(hosts.train(&["--steps", "100000", "--deadline", "3"]))?;
    let out = hosts.out();
    job.until("three steps", || (steps(&out) >= 3).then_some(()))?;
    ip(&["link", "set", &hosts.line(3), "down"])?;
    // Each side ends by its deadline, with a record, unless mpirun is faster; and that hears of the
    // far one when the line is there again.
    job.until("a flight record", || (records(&out) > 0).then_some(()))?;
    ip(&["link", "set", &hosts.line(3), "up"])?;
    let ended = job.end()?;
    if ended.code == Some(0) {
        return Err("exit code 0".to_owned());
    }
    has(&ended.err, &["world aborted: rank ", "deadline of 3s missed"])
}

fn steps(out: &Path) -> usize {
    fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

fn records(out: &Path) -> usize {
    let files = fs::read_dir(out.join("flight")).into_iter().flatten().flatten();
    files.filter(|file| file.file_name().to_string_lossy().starts_with("rank-")).count()
}
