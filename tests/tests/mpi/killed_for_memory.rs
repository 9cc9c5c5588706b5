//! Row 46: a process that the kernel kills to have its memory back, or gives none. To its peers it
//! is as if it had been killed by hand.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::time::Instant;

use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, prlimit};

use crate::Named;
use crate::faults::{ends_promptly, folder, four, is_told, steps};
use crate::job::{Job, TEXT, mpirun, runs, train_gpt};

pub(crate) const TRIALS: &[Named] =
    &[("killed_for_memory::row_46_a_process_that_gets_no_memory", gets_no_memory)];

pub(crate) const BY_THE_KERNEL: Named =
    ("killed_for_memory::row_46_a_process_that_the_kernel_kills", killed_by_the_kernel);

/// Why the kernel kills nobody here for its memory, if so.
pub(crate) fn lacks() -> Option<&'static str> {
    Group::new()
        .is_none()
        .then_some("no control group (version 2) whose memory this user may limit")
}

/// It may map nothing more: the next allocation that needs the kernel is refused.
fn gets_no_memory() -> Result<(), String> {
    let out = folder()?;
    // Each step needs the kernel: weights of this width have gradients of 1 MiB, and an allocation
    // of more than 512 KiB has a mapping of its own, which ends with it. Smaller ones come to use
    // what others have left, and no step would need anything.
    let mut training = four(&["--steps", "100000", "--width", "256"], out.path());
    // By default the program's allocator keeps what it has, and would go on with that.
    training.envs([("MIMALLOC_DISALLOW_ARENA_ALLOC", "1"), ("MIMALLOC_PURGE_DELAY", "0")]);
    let job = Job::start(training)?;
    let processes = job.processes(4)?;
    job.until("three steps", || (steps(out.path()) >= 3).then_some(()))?;
    refuse_memory(processes[2])?;
    let made = steps(out.path());
    // It goes on for as long as what it has is enough.
    job.until("the end of rank 2", || (!runs(processes[2])).then_some(()))?;
    let ended = ends_promptly(job, Instant::now())?;
    // It may have begun the step after the next, and have had all that it needs there.
    let more = steps(out.path()) - made;
    if more > 2 {
        return Err(format!("{more} steps were made without the kernel"));
    }
    // Most allocations end the process at once. Those for what it sends and receives give an error,
    // which all get.
    let says = |texts: [&str; 2]| texts.iter().any(|text| ended.err.contains(text));
    if !says(["out of memory: ", "no memory for a message of "]) {
        return is_told(out.path());
    }
    let names_it = says(["world aborted: rank 2, ", " aborted by rank 2: "]);
    if names_it { Ok(()) } else { Err(ended.err) }
}

fn refuse_memory(to: Pid) -> Result<(), String> {
    let to = rustix::process::Pid::from_raw(to.as_raw());
    let nothing = Rlimit { current: Some(0), maximum: Some(0) };
    prlimit(to, Resource::As, nothing).map_err(|error| error.to_string())?;
    Ok(())
}

/// Its group may have much less memory than it has.
fn killed_by_the_kernel() -> Result<(), String> {
    let out = folder()?;
    let group = Group::new().ok_or("there was one")?;
    let job = Job::start(four_of_which_one_in(&group, out.path()))?;
    job.processes(4)?;
    job.until("three steps", || (steps(out.path()) >= 3).then_some(()))?;
    let at = Instant::now();
    group.limit()?;
    ends_promptly(job, at)?;
    is_told(out.path())?;
    match group.killed() {
        0 => Err("the kernel has killed nobody".to_owned()),
        _ => Ok(()),
    }
}

/// Four processes, of which rank 2 is in that group.
fn four_of_which_one_in(group: &Group, out: &Path) -> process::Command {
    let one = train_gpt().display().to_string();
    let out = out.display().to_string();
    let enter = format!("echo $$ > {} && exec \"$@\"", group.0.join("cgroup.procs").display());
    let train = [
        one.as_str(),
        "--comm",
        "mpi",
        "--mesh",
        "2x2",
        "--layers",
        "2",
        "--steps",
        "100000",
        "--data",
        TEXT,
        "--out",
        &out,
    ];
    let mut command = mpirun();
    command.args(["-n", "2"]).args(train);
    command.args([":", "-n", "1", "sh", "-c", &enter, "sh"]).args(train);
    command.args([":", "-n", "1"]).args(train);
    command
}

/// A control group of the kernel's, gone when dropped.
struct Group(PathBuf);

impl Group {
    /// Below the nearest group of this process's that may limit the memory of those below it.
    fn new() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
        let root = Path::new("/sys/fs/cgroup");
        let limits_memory = |folder: &&Path| {
            let given = fs::read_to_string(folder.join("cgroup.subtree_control"));
            given.is_ok_and(|given| given.split_ascii_whitespace().any(|what| what == "memory"))
        };
        let own = root.join(own);
        let above = own.ancestors().take_while(|folder| folder.starts_with(root));
        let parent = above.into_iter().find(limits_memory)?;
        let group = parent.join(format!("hsdp-test-{}", process::id()));
        fs::create_dir(&group).ok()?;
        Some(Self(group))
    }

    fn limit(&self) -> Result<(), String> {
        // Where there is no swap, there is nothing to be written.
        let _ = fs::write(self.0.join("memory.swap.max"), "0");
        fs::write(self.0.join("memory.max"), "65536").map_err(|error| error.to_string())
    }

    /// How many processes the kernel has killed in it.
    fn killed(&self) -> u64 {
        let events = fs::read_to_string(self.0.join("memory.events")).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Nobody is in it any more, or it stays.
        let _ = fs::remove_dir(&self.0);
    }
}
