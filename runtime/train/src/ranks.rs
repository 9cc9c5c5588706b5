//! The ranks of a program: threads of this process, or processes.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, fs, io, thread};

use clap::Parser;
use hsdp::{Launched, Placement, RankFailure, World, WorldOptions, memory};

use crate::command_line;
use crate::failure::Failure;
use crate::folder::{RunFolder, TraceRecorder};
use crate::options::{Comm, RunOptions};
use crate::run::{Report, RunEnd};
use crate::setup::{PROBLEM, ProcessShare, Setup, compare, refused};
use crate::signals::Signals;
use crate::threads::Records;
use crate::warnings::Warnings;
#[cfg(feature = "nccl")]
use hsdp::control;
#[cfg(feature = "mpi")]
use hsdp::mpi;

/// Runs a program with options on its command line. `options` returns the run's options among them.
/// A failure is reported as one line on stderr.
///
/// First restarts the program with the environment variables that determine the speed of a rank:
/// `RAYON_NUM_THREADS`, which divides the cores among the ranks, and `MIMALLOC_PURGE_DELAY`.
/// Variables that the user has set stay as they are.
///
/// Warnings of all libraries go to stderr, and SIGINT and SIGTERM end a run after the current step.
pub fn main<O: Parser>(
    name: &'static str,
    options: impl FnOnce(&O) -> &RunOptions,
    work: impl FnOnce(&O, &Ranks) -> Result<(), Failure>,
) -> ExitCode {
    match command_line::read::<O>() {
        Ok(read) => with_ranks(name, options(&read), |ranks| work(&read, ranks)),
        Err(error) => Failure::from(error).with_launched_rank().tell(name),
    }
}

/// Runs a program as [`main`] does, with options that are set in code.
pub fn with_ranks(
    name: &'static str,
    options: &RunOptions,
    work: impl FnOnce(&Ranks) -> Result<(), Failure>,
) -> ExitCode {
    let joined = options.of_process().map_err(Failure::with_launched_rank).and_then(|options| {
        prepare(sharing(&options)?)?;
        Ranks::join(name, options)
    });
    // The failure is printed before the ranks end, because a launcher kills the other processes as
    // soon as one has exited.
    match joined {
        Ok(ranks) => match ranks.check().and_then(|()| work(&ranks)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => failure.tell(name),
        },
        Err(failure) => failure.tell(name),
    }
}

/// A program's ranks after they have joined.
#[derive(Debug)]
pub struct Ranks {
    process: ProcessShare,
    world: WorldOptions,
    joined: JoinedRanks,
    recorder: TraceRecorder,
}

/// Kind of the joined ranks.
#[derive(Debug)]
enum JoinedRanks {
    /// Threads of this process. All ranks are here.
    Threads,
    /// Processes under MPI. This process is one of them.
    #[cfg(feature = "mpi")]
    Mpi(mpi::Job),
    /// Processes on GPUs that `hsdp launch` or torchrun has started. This process is one of them.
    #[cfg(feature = "nccl")]
    Nccl(control::Job),
}

impl Ranks {
    /// Joins the ranks as the options require. Processes wait for each other here.
    fn join(name: &'static str, options: RunOptions) -> Result<Self, Failure> {
        let warnings = Warnings::of(name);
        let recorder = TraceRecorder::listen(&warnings)?;
        let world = options.world();
        world.check(options.mesh.world_size()).map_err(Failure::input)?;
        let joined = match options.comm {
            Comm::Threads => JoinedRanks::Threads,
            Comm::Mpi => by_mpi(world.deadline)?,
            Comm::Nccl => by_nccl(world.deadline)?,
        };
        let signals = Signals::default();
        let process = ProcessShare { name, options, warnings, signals };
        let ranks = Self { process, world, joined, recorder };
        let (rank, processes) = ranks.place();
        if processes > 1 {
            ranks.process.warnings.set_rank(rank);
        }
        Ok(ranks)
    }

    /// Refuses a mesh whose number of ranks differs from the number of processes. If only some
    /// processes have such a mesh, creating a world fails on all of them with an error that has
    /// both sizes.
    fn check(&self) -> Result<(), Failure> {
        let mesh = self.process.options.mesh;
        let (rank, processes) = self.place();
        if matches!(self.joined, JoinedRanks::Threads) || mesh.world_size() == processes {
            return Ok(());
        }
        match (self.launch(drop), rank) {
            (Err(differs @ Failure::Input(_)), _) => Err(differs),
            (_, 0) => Err(Failure::Input(format!(
                "mesh {mesh} has {} ranks, and there are {processes} processes",
                mesh.world_size()
            ))),
            _ => Err(Failure::Elsewhere),
        }
    }

    /// Returns the options of the run, with the device of this process.
    #[must_use]
    pub fn options(&self) -> &RunOptions {
        &self.process.options
    }

    /// Returns whether rank 0 is in this process.
    #[must_use]
    pub fn has_first(&self) -> bool {
        self.place().0 == 0
    }

    /// Returns this process's index and the number of processes.
    fn place(&self) -> (usize, usize) {
        match &self.joined {
            JoinedRanks::Threads => (0, 1),
            #[cfg(feature = "mpi")]
            JoinedRanks::Mpi(job) => (job.rank().index(), job.size()),
            #[cfg(feature = "nccl")]
            JoinedRanks::Nccl(job) => (job.rank().index(), job.size()),
        }
    }

    /// Runs a training program: reads the inputs once in each process, trains on each rank, writes
    /// the files of `--out`, and prints the report of rank 0.
    ///
    /// If a process cannot read its inputs, the ranks of all processes end with its error.
    ///
    /// # Errors
    /// [`Failure::Input`] with the text of any failure of `read`: rank 0 reports it, and the
    /// processes of other ranks end with [`Failure::Elsewhere`]. The first failure, in the order of
    /// the ranks, that does not only follow from that of another rank, with an explanation that is
    /// derived from the last operations of the ranks. [`Failure::Stopped`] if a signal has ended
    /// the run; [`Failure::Work`] if the last checkpoint was not saved or the report cannot be
    /// written; [`Failure::Disagreement`] if calls and bytes were not as planned.
    pub fn run<I: Sync>(
        &self,
        read: impl FnOnce() -> Result<I, Failure>,
        train: impl Fn(Setup<'_>, &I) -> Result<Report, Failure> + Sync,
    ) -> Result<(), Failure> {
        let _signals = self.process.signals.during_run();
        let inputs = read().map_err(Failure::in_reading);
        let inputs = inputs.and_then(|inputs| Ok((inputs, self.output()?)));
        // Other processes wait for this one. They learn its problem where they compare inputs.
        let inputs = if self.process.options.comm == Comm::Threads { Ok(inputs?) } else { inputs };
        let files = inputs.as_ref().ok().and_then(|(_, output)| output.as_ref());
        let files = files.map(RunFolder::files);
        let inputs = inputs.as_ref().map(|(inputs, _)| inputs);
        let reports = self.each(|world| {
            let inputs = self.compare_inputs(&world, inputs)?;
            let index = world.rank().index();
            if index == 0 || !world.shares_memory() {
                // Until the ranks have met, a signal ends the process at once.
                self.process.signals.listen().map_err(Failure::work)?;
            }
            connect(&world, self.process.options.device)?;
            let files = files.filter(|_| index == 0);
            train(Setup { world, process: &self.process, files }, inputs)
        })?;
        let (ended, report) = Report::of_all(reports);
        let is_first = report.is_some();
        let reported = report.map_or(Ok(()), |report| report.publish(files));
        let ended = self.outcome(ended, is_first);
        if let (Err(_), Err(failure)) = (&reported, &ended) {
            failure.tell(self.process.name);
        }
        reported.and(ended)
    }

    /// Prepares the folder of `--out` in the process of rank 0.
    fn output(&self) -> Result<Option<RunFolder>, Failure> {
        let folder = self.process.options.out.as_deref().filter(|_| self.has_first());
        folder
            .map(|folder| RunFolder::create(folder, &self.process.options, &self.recorder))
            .transpose()
    }

    /// Returns the inputs of this process, after the ranks have compared the options of the run and
    /// learned whether every process has inputs. Collective.
    fn compare_inputs<'i, I>(
        &self,
        world: &World,
        inputs: Result<&'i I, &Failure>,
    ) -> Result<&'i I, Failure> {
        compare(world, "options", &self.process.options.shared())?;
        let problem =
            inputs.err().map_or_else(String::new, |failure| format!("{PROBLEM}{failure}"));
        compare(world, "inputs", &problem)?;
        inputs.map_err(|failure| refused(world, failure.to_string()))
    }

    /// Returns the outcome of a run. Only the process of rank 0 reports that a signal has ended it,
    /// or that the last checkpoint was not saved.
    fn outcome(&self, ended: RunEnd, is_first: bool) -> Result<(), Failure> {
        let RunEnd { steps, was_stopped, unsaved } = ended;
        let signal = self.process.signals.caught();
        let stopped = was_stopped.then_some(Failure::Stopped { signal, steps });
        let failure = match (unsaved, stopped) {
            (None, None) => return Ok(()),
            // Rank 0 is still writing its files, and a launcher would kill it.
            _ if !is_first => Failure::Elsewhere,
            (None, Some(stopped)) => stopped,
            (Some(unsaved), None) => Failure::Work(unsaved).in_training(),
            (Some(unsaved), Some(stopped)) => {
                Failure::Work(format!("{stopped}, and {unsaved}")).in_training()
            }
        };
        Err(failure)
    }

    /// Runs `rank` on each rank of this process, and returns their results.
    fn each<T: Send>(
        &self,
        rank: impl Fn(World) -> Result<T, Failure> + Sync,
    ) -> Result<Vec<T>, Failure> {
        memory::reset_peaks();
        let records = Records::default();
        let outcomes = self.launch(|world| records.of(world, &rank))?;
        records.results(outcomes).map_err(|failure| match self.has_first() {
            true => failure.with_first_rank(),
            false => failure,
        })
    }

    /// Runs the ranks of this process. A failure is a result here and does not end the world: when
    /// all ranks refuse the same input, each must return its own text.
    fn launch<T: Send>(
        &self,
        rank: impl Fn(World) -> T + Sync,
    ) -> Result<Vec<Result<T, RankFailure>>, Failure> {
        let size = self.process.options.mesh.world_size();
        let world = self.world.clone();
        let rank = |world| Ok(rank(world));
        match &self.joined {
            JoinedRanks::Threads => Ok(hsdp::launch(size, world, rank)),
            #[cfg(feature = "mpi")]
            JoinedRanks::Mpi(job) => {
                Ok(job.launch(size, world, rank).map_err(no_world)?.into_iter().collect())
            }
            #[cfg(feature = "nccl")]
            JoinedRanks::Nccl(job) => {
                Ok(job.launch(size, world, rank).map_err(no_world)?.into_iter().collect())
            }
        }
    }
}

/// Returns the failure to create a world. A difference between command lines counts as an error of
/// input.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn no_world(error: hsdp::CommError) -> Failure {
    match error {
        hsdp::CommError::Setup(hsdp::SetupError::ConfigMismatch { .. }) => Failure::input(error),
        error => Failure::work(error).in_training(),
    }
}

#[cfg(feature = "mpi")]
fn by_mpi(deadline: Duration) -> Result<JoinedRanks, Failure> {
    mpi::Job::join(deadline)
        .map(JoinedRanks::Mpi)
        .map_err(|error| Failure::work(error).in_training())
}

#[cfg(not(feature = "mpi"))]
fn by_mpi(_: Duration) -> Result<JoinedRanks, Failure> {
    Err(Failure::input("--comm mpi: build with --features mpi"))
}

#[cfg(feature = "nccl")]
fn by_nccl(deadline: Duration) -> Result<JoinedRanks, Failure> {
    use hsdp::control::ArgumentError::Environment;
    use hsdp::control::ControlError;

    let joined = control::Job::from_env(deadline);
    joined.map(JoinedRanks::Nccl).map_err(|error| match error {
        ControlError::Argument(Environment { .. }) => {
            Failure::input(format!("--comm nccl: {error}"))
        }
        error => Failure::work(error).in_training(),
    })
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(_: Duration) -> Result<JoinedRanks, Failure> {
    Err(Failure::input("--comm nccl: build with --features nccl"))
}

/// Connects the ranks through NCCL if they are processes and the model is on devices. Collective.
fn connect(world: &World, device: Placement) -> Result<(), Failure> {
    match device {
        Placement::Host => Ok(()),
        _ if world.shares_memory() || world.size() == 1 => Ok(()),
        device => connect_devices(world, device),
    }
}

#[cfg(feature = "nccl")]
fn connect_devices(world: &World, device: Placement) -> Result<(), Failure> {
    let Placement::Cuda { ordinal, .. } = device else { return Ok(()) };
    let device = hsdp::kernels::cuda::Device::new(ordinal)?;
    Ok(world.connect_nccl(&device)?)
}

#[cfg(not(feature = "nccl"))]
fn connect_devices(_: &World, device: Placement) -> Result<(), Failure> {
    Err(Failure::input(format!("--device {device} in processes: build with --features nccl")))
}

/// Name of the variable with the number of compute threads, which candle, its matmul and rayon
/// read.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Name of the variable with the time in milliseconds after which mimalloc returns freed memory to
/// the system. -1 means never.
const PURGE_DELAY: &str = "MIMALLOC_PURGE_DELAY";

/// Returns the number of ranks that share the cores of this process. It is 1 if the launcher has
/// bound this process to some of the cores. Otherwise it is the number of ranks on this machine, or
/// all ranks if the launcher does not set that number.
pub(crate) fn sharing(options: &RunOptions) -> Result<usize, Failure> {
    let ranks = options.mesh.world_size();
    if options.comm == Comm::Threads {
        return Ok(ranks);
    }
    let launched = Launched::from_env().map_err(Failure::input)?;
    let here = launched.and_then(|launched| launched.size_here).filter(|here| *here > 0);
    Ok(if is_bound() { 1 } else { here.unwrap_or(ranks) })
}

/// Returns whether this process may use only some of the machine's cores. `false` if the system
/// does not list them.
fn is_bound() -> bool {
    let read = |file| fs::read_to_string(file).ok();
    let status = read("/proc/self/status");
    let allowed = status.as_deref().and_then(|text| {
        let mut lines = text.lines();
        lines.find_map(|line| cores(line.strip_prefix("Cpus_allowed_list:")?))
    });
    let online = read("/sys/devices/system/cpu/online").and_then(|text| cores(&text));
    allowed.zip(online).is_some_and(|(allowed, online)| !online.is_subset(&allowed))
}

/// Parses a list of cores, such as `0-3,8`.
fn cores(list: &str) -> Option<BTreeSet<usize>> {
    let mut cores = BTreeSet::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cores.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cores)
}

/// Restarts the program with the environment variables that determine the speed of ranks, as
/// [`main`] does, unless the user has set them. `ranks` is the number of ranks that share the cores
/// of this process.
///
/// - A rank computes on its share of the cores. candle's default is all cores for each op, so the
///   ranks of this process would compete for them: four ranks on two cores would take almost twice
///   as long.
/// - Freed memory is kept. Each op frees and allocates tensors of the same sizes, and the system
///   has to zero memory before it provides it again.
///
/// The allocator reads its variable when a process starts, and a process with threads cannot safely
/// change its environment.
///
/// # Errors
/// [`Failure::Work`] if the program cannot be started again.
pub fn prepare(ranks: usize) -> Result<(), Failure> {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = (cores / ranks).max(1).to_string();
    let wanted = [(THREADS, threads.as_str()), (PURGE_DELAY, "-1")];
    let missing: Vec<_> =
        wanted.into_iter().filter(|(name, _)| env::var_os(name).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut again = Command::new(env::current_exe().map_err(Failure::work)?);
    again.args(env::args_os().skip(1)).envs(missing);
    Err(Failure::work(replace_process(again)))
}

/// Replaces this process. Returns only on failure.
fn replace_process(mut command: Command) -> io::Error {
    std::os::unix::process::CommandExt::exec(&mut command)
}

#[cfg(test)]
mod tests {
    use crate::options::EvaluationOptions;
    use crate::run::Training;
    use crate::threads;
    use hsdp::comm::Between;
    use hsdp::{
        LossSum, Mesh, ModelSpec, Optimizer as _, Param, Sgd, SgdOptions, ShardedModel, Unit,
        UnitGradients,
    };
    use std::sync::LazyLock;

    use super::*;

    /// Ranks of a program with one process.
    static RANKS: LazyLock<Ranks> = LazyLock::new(|| {
        let mesh = Mesh::new(2, 2).expect("a mesh");
        let options = RunOptions { mesh, ..RunOptions::default() };
        Ranks::join("test", options).expect("threads are always there")
    });

    /// Returns the failures of two ranks: rank 0 reports one, and rank 1 is silent.
    fn failures(rank: impl Fn(&World) -> Result<(), Failure> + Sync) -> [Option<String>; 2] {
        let ends = hsdp::launch(2, WorldOptions::default(), |world| {
            Ok::<_, RankFailure>(match (rank(&world), world.rank().index()) {
                (Ok(()), _) => None,
                (Err(Failure::Input(what)), 0) => Some(what),
                (Err(Failure::Elsewhere), 1) => Some(String::new()),
                (Err(failure), rank) => panic!("rank {rank}: {failure}"),
            })
        });
        let ends: Vec<_> = ends.into_iter().map(|end| end.expect("no panic")).collect();
        ends.try_into().expect("two ranks")
    }

    #[test]
    fn ranks_with_different_inputs_do_not_train() {
        let texts = ["she sells", "she smells"];
        let differ = |world: &World| compare(world, "text", texts[world.rank().index()]);
        let [first, second] = failures(differ);
        let said = first.expect("they differ");
        assert!(said.starts_with("ranks 0 and 1 differ in their text: she sells"), "{said}");
        assert!(said.contains("she smells"), "{said}");
        assert_eq!(second.as_deref(), Some(""));
        assert_eq!(failures(|world| compare(world, "text", texts[0])), [None, None]);
    }

    #[test]
    fn the_ranks_learn_the_problem_of_one_that_has_no_inputs() {
        let problem = Failure::input("cannot read x");
        // The program's `read` may fail with an error of any type.
        let other = Failure::work("cannot read x");
        for (inputs, expected) in [
            ([Ok(&()), Err(&problem)], "rank 1: cannot read x"),
            ([Ok(&()), Err(&other)], "rank 1: cannot read x"),
            ([Err(&problem), Ok(&())], "rank 0: cannot read x"),
            // All ranks have this problem, so the text names no rank.
            ([Err(&problem), Err(&problem)], "cannot read x"),
        ] {
            let learned = failures(|world| {
                RANKS.compare_inputs(world, inputs[world.rank().index()]).copied()
            });
            assert_eq!(learned, [Some(expected.to_owned()), Some(String::new())]);
        }
    }

    #[test]
    fn a_run_that_ends_early_fails_in_the_process_of_rank_0_alone() {
        for (was_stopped, unsaved) in [(true, None), (false, Some("full")), (true, Some("full"))] {
            let unsaved = unsaved.map(str::to_owned);
            let ended = RunEnd { steps: 3, was_stopped, unsaved };
            let first = RANKS.outcome(ended.clone(), true);
            assert!(matches!(first, Err(Failure::Stopped { .. } | Failure::Work(_))), "{first:?}");
            let other = RANKS.outcome(ended, false);
            assert!(matches!(other, Err(Failure::Elsewhere)), "{other:?}");
        }
        let ended = RunEnd { steps: 3, was_stopped: false, unsaved: None };
        assert!(RANKS.outcome(ended, false).is_ok());
    }

    /// Trains one step. All ranks drop their evaluation before its mean, and return a number.
    fn train_and_drop_the_evaluation(setup: Setup<'_>) -> Result<Report, Failure> {
        let spec = ModelSpec::new().unit(Unit::new("u").param(Param::new("w", [8])));
        let unit = spec.unit_ids().next().expect("one unit");
        let model =
            ShardedModel::new(setup.world(), spec, setup.model_options(), |_| vec![0.5; 8])?;
        let sgd = Sgd::new(&model, SgdOptions::default());
        let evaluation =
            EvaluationOptions { evaluate_every: Some(1), ..EvaluationOptions::default() };
        let training = Training { evaluation, ..Training::of_steps(1) };
        let mut run = setup.start(model, sgd, training)?;
        while run.next_step()?.is_some() {
            let gradients = run.gradients(|mut pass, _| -> Result<(), hsdp::Error> {
                drop(pass.unshard(unit)?);
                let _ = pass.loss(LossSum::new(1.0, 1))?;
                pass.reduce(unit, UnitGradients::of([vec![1.0_f32; 8]]))?;
                pass.finish()
            })?;
            run.update(|model, sgd| sgd.step(model, gradients))?;
            run.evaluate(|model, _| -> Result<f64, hsdp::Error> {
                let mut evaluation = model.evaluation()?;
                let mut pass = evaluation.batch()?;
                drop(pass.unshard(unit)?);
                pass.finish()?;
                Ok(f64::NAN)
            })?;
        }
        run.finish()
    }

    #[test]
    fn an_evaluation_that_is_dropped_before_its_mean_is_the_failure_of_the_run() {
        for between in [Between::Memory, Between::Messages] {
            for _ in 0..20 {
                let options = WorldOptions { between, ..RANKS.options().world() };
                let trained = threads::run(4, options, |world| {
                    train_and_drop_the_evaluation(Setup {
                        world,
                        process: &RANKS.process,
                        files: None,
                    })
                });
                let failure = trained.expect_err("no mean was taken").to_string();
                let named = "the evaluation was dropped before its mean";
                assert!(failure.contains(named), "{between:?}: {failure}");
            }
        }
    }

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(cores(" 0-3,8\n"), Some(BTreeSet::from([0, 1, 2, 3, 8])));
        assert_eq!(cores("5"), Some(BTreeSet::from([5])));
        assert_eq!([cores(""), cores("0-x")], [None, None]);
    }

    /// Variable with which this test restarts itself in a process of its own.
    const OWN: &str = "HSDP_TEST_OF_CORES";

    #[test]
    fn the_processes_of_one_machine_share_its_cores() {
        let mesh = "4x2".parse().expect("a mesh");
        let threads = RunOptions { mesh, ..RunOptions::default() };
        let processes = RunOptions { comm: Comm::Mpi, ..threads.clone() };
        if env::var_os(OWN).is_some() {
            let [threads, processes] =
                [threads, processes].map(|it| sharing(&it).expect("a number"));
            println!("{threads} threads, {processes} processes");
            return;
        }
        let shared = |local: &[(&str, &str)]| {
            let mut own = Command::new(env::current_exe().expect("a path"));
            own.args(["--nocapture", "the_processes_of_one_machine"]).env_clear().env(OWN, "1");
            own.env("OMPI_COMM_WORLD_RANK", "3").env("OMPI_COMM_WORLD_SIZE", "8");
            let ended = own.envs(local.iter().copied()).output().expect("it starts");
            String::from_utf8_lossy(&ended.stdout).into_owned()
        };
        let unless_bound = |ranks: usize| if is_bound() { 1 } else { ranks };
        for (local, here) in [(&[][..], 8), (&[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")], 2)] {
            let expected = format!("8 threads, {} processes", unless_bound(here));
            let printed = shared(local);
            assert!(printed.contains(&expected), "{printed}");
        }
    }
}
