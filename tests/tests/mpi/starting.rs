//! Jobs that cannot be what they are started as.

use std::env;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hsdp::WorldOptions;
use hsdp::mpi::Job;

use crate::Named;
use crate::faults::{folder, steps};
use crate::job::{Ended, has, hsdp_launch, mpirun, run, train_gpt};

pub(crate) const TRIALS: &[Named] = &[
    ("starting::row_6_a_process_that_makes_no_world", makes_no_world),
    ("starting::row_9_a_mesh_of_another_size", another_size),
    ("starting::row_9_a_mesh_of_another_size_on_one_rank", another_size_on_one_rank),
    ("starting::row_9_a_mesh_of_another_size_under_hsdp_launch", another_size_under_launch),
    ("starting::faults_that_cannot_be", bad_faults),
];

/// Set in the environment of processes that run [`as_process`], and not the tests.
pub(crate) const PROCESS: &str = "HSDP_TESTS_PROCESS";

/// Two processes join a job, and only the first makes a world: it says how long it took to leave
/// the job, and fails.
pub(crate) fn as_process() -> Result<(), String> {
    let job = Job::join(Duration::from_secs(60)).map_err(|error| error.to_string())?;
    if job.rank().index() > 0 {
        let (_says, hears) = mpsc::channel::<()>();
        // The launcher ends it before.
        let _ = hears.recv_timeout(Duration::from_secs(60));
        return Ok(());
    }
    let options = WorldOptions { deadline: WORLD, ..WorldOptions::default() };
    let missed = job.world(2, options).map(drop).expect_err("the other does not come");
    let started = Instant::now();
    drop(job);
    Err(format!("{missed}; left after {} ms", started.elapsed().as_millis()))
}

/// For so long a world is waited for.
const WORLD: Duration = Duration::from_secs(2);

/// A job is left by this time, though the deadline of the job is a minute.
const PROMPTLY: Duration = Duration::from_secs(20);

fn makes_no_world() -> Result<(), String> {
    let mut command = mpirun();
    let program = env::current_exe().map_err(|error| error.to_string())?;
    command.args(["-n", "2"]).arg(program).env(PROCESS, "1");
    let ended = run(command)?;
    has(&ended.err, &["after 2s ranks [1] have not joined; ranks [0] have; left after "])?;
    let (_, took) = ended.err.split_once("left after ").ok_or("it is there")?;
    let took = took.split(' ').next().and_then(|took| took.parse().ok());
    match took.map(Duration::from_millis) {
        Some(took) if took < PROMPTLY => Ok(()),
        took => Err(format!("it left after {took:?}")),
    }
}

fn another_size() -> Result<(), String> {
    let out = folder()?;
    let mut command = mpirun();
    command.args(["-n", "4"]).arg(train_gpt()).args(["--comm", "mpi", "--mesh", "2x3"]);
    command.arg("--out").arg(out.path());
    let ended = run(command)?;
    has(&ended.err, &["mesh 2x3 has 6 ranks, and there are 4 processes"])?;
    match (ended.code, steps(out.path())) {
        (Some(2), 0) => Ok(()),
        other => Err(format!("exit code and steps are {other:?}: {}", ended.err)),
    }
}

fn another_size_on_one_rank() -> Result<(), String> {
    let mut command = mpirun();
    for (processes, mesh) in [("3", "2x2"), (":", ""), ("1", "2x3")] {
        if processes == ":" {
            command.arg(":");
            continue;
        }
        command.args(["-n", processes]).arg(train_gpt()).args(["--comm", "mpi", "--mesh", mesh]);
    }
    refused_at_once(command)
}

/// The launcher starts one command for all ranks: a shell gives the last one another mesh.
fn another_size_under_launch() -> Result<(), String> {
    let mut command = hsdp_launch("4");
    let mesh = "case ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} in 3) mesh=2x3;; *) mesh=2x2;; esac";
    command.args(["sh", "-c", &format!("{mesh}; exec \"$0\" --comm mpi --mesh $mesh")]);
    command.arg(train_gpt());
    refused_at_once(command)
}

fn refused_at_once(command: Command) -> Result<(), String> {
    let started = Instant::now();
    let ended = run(command)?;
    let both = ["ranks 0 and 3 differ in their size of the world: 4 (process ", ", 6 (process "];
    has(&ended.err, &both)?;
    with_code_2_by(ended, started, Duration::from_secs(60))
}

fn with_code_2_by(ended: Ended, started: Instant, latest: Duration) -> Result<(), String> {
    let took = ended.at - started;
    match ended.code {
        Some(2) if took < latest => Ok(()),
        code => Err(format!("exit code {code:?} after {took:?}: {}", ended.err)),
    }
}

fn bad_faults() -> Result<(), String> {
    let refused = [
        ("rank 4294967296, step 1, unit 1: panic", "N below 2^32"),
        ("rank 1, step 1, unit 1: a gradient of 5", "a gradient of 5 is finite in every dtype"),
        ("rank 2, step 1, unit 1: panic", "the world has 2 ranks, numbered from 0"),
        ("rank 1, step 1, unit 99: panic", "units, numbered from 0"),
    ];
    for (fault, problem) in refused {
        for command in [mpirun(), Command::new(train_gpt())] {
            let mut command = command;
            if command.get_program() == "mpirun" {
                command.args(["-n", "2"]).arg(train_gpt()).args(["--comm", "mpi"]);
            }
            command.args(["--mesh", "1x2", "--fault", fault]);
            let started = Instant::now();
            let ended = run(command)?;
            let said: Vec<&str> =
                ended.err.lines().filter(|line| line.starts_with("train_gpt: ")).collect();
            if said.is_empty() || !said.iter().all(|line| line.contains(problem)) {
                return Err(format!("{fault}: {}", ended.err));
            }
            with_code_2_by(ended, started, Duration::from_secs(60))?;
        }
    }
    Ok(())
}
