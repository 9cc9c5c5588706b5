//! The options of a run that do not depend on its model.

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, ValueEnum};
use hsdp::testing::Fault;
use hsdp::{
    Accumulation, DType, DynamicScale, Launched, LossScaling, Mesh, ModelOptions, Offload,
    Placement, Precision, Rank, StateOver, WorldOptions,
};

use crate::failure::Failure;
use crate::number::{count, seconds};
use crate::threads;

/// Name of the folder with the flight records of a failed run.
pub(crate) const FLIGHT: &str = "flight";

/// Maximum number of units that are gathered ahead. No model has more units.
pub const MAX_UNITS: usize = 10_000;
/// Maximum number of microbatches in a step, for which a step's bytes still fit 64 bits.
pub const MAX_MICROBATCHES: usize = 1 << 16;
/// Maximum number of steps. Each step leaves a record in memory for the report, so memory may allow
/// fewer.
pub const MAX_STEPS: usize = 1_000_000_000;

/// Options that spread a run over ranks and name its files. A program flattens them into its
/// command line with `#[command(flatten)]`, or sets them in code:
///
/// ```
/// use hsdp_train::RunOptions;
///
/// let options = RunOptions { mesh: "1x2".parse()?, microbatches: 4, ..RunOptions::default() };
/// # assert_eq!(options.deadline, 120.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// Mesh of replicas x shards, such as 2x2; the product is the number of ranks
    #[arg(long, value_name = "RxS", default_value = "2x2")]
    pub mesh: Mesh,

    /// How the ranks run and communicate
    #[arg(long, value_name = "COMM", value_enum, default_value_t = Comm::Threads)]
    pub comm: Comm,

    /// Device on which the model is kept, reduced and updated: cpu, cuda or cuda:N (a build with
    /// --features cuda; with candle-cuda candle computes there too)
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Placement,

    /// Part of a model on a GPU that is kept and updated in host memory: none, optimizer or all
    #[arg(long, value_name = "PART", default_value = "none")]
    pub offload: Offload,

    /// Number of microbatches in a step, on each rank; at most 65536
    #[arg(
        long, value_name = "COUNT", default_value_t = 2,
        value_parser = count::<1, { MAX_MICROBATCHES }>
    )]
    pub microbatches: usize,

    /// Dtype of gathered parameters and of the model's computation: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    pub param_dtype: DType,

    /// Dtype of gradients on the wire: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    pub reduce_dtype: DType,

    /// When gradients are communicated: reduce-scatter (scattered in each microbatch, all-reduced
    /// once a step), every (both in each microbatch) or local (both once a step)
    #[arg(long, value_name = "MODE", default_value = "reduce-scatter")]
    pub accumulation: Accumulation,

    /// Ranks over which the optimizer's state is divided: shards (those of a shard group) or world
    /// (all; updated parameters are gathered over the replicas)
    #[arg(long, value_name = "RANKS", default_value = "shards")]
    pub state_over: StateOver,

    /// Number of units that are gathered before they are needed, at most 10000
    #[arg(
        long, value_name = "UNITS", default_value_t = 1,
        value_parser = count::<0, { MAX_UNITS }>
    )]
    pub prefetch: usize,

    /// Seconds that a rank waits for other ranks before the run fails
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    pub deadline: f64,

    /// Time that a rank waits for others before it warns. It can be set in code only.
    #[arg(skip = WorldOptions::default().late)]
    pub late: Duration,

    /// Fault to inject, such as "rank 1, step 3, unit 2, reduce: freeze"; repeat the option for
    /// more; none by default
    #[arg(long = "fault", value_name = "FAULT")]
    pub faults: Vec<Fault>,

    /// Save a checkpoint in DIR/checkpoints after every STEPS steps, at the end, and on SIGINT or
    /// SIGTERM; off by default
    #[arg(
        long, value_name = "STEPS", requires = "out",
        value_parser = count::<1, { MAX_STEPS }>
    )]
    pub save_every: Option<usize>,

    /// Number of checkpoints that are kept, at least 2; the oldest are removed
    #[arg(
        long, value_name = "COUNT", default_value_t = 2, requires = "out",
        value_parser = count::<2, { MAX_STEPS }>
    )]
    pub keep: usize,

    /// Write norms of each parameter into metrics.jsonl in every STEPS-th step (of gradients, of
    /// parameters, and of updates over parameters), and draw the latter into norms.svg; off by
    /// default
    #[arg(
        long, value_name = "STEPS", requires = "out",
        value_parser = count::<1, { MAX_STEPS }>
    )]
    pub norms_every: Option<usize>,

    /// Resume from the newest checkpoint in DIR/checkpoints, if there is one, and save one at the
    /// end and on SIGINT or SIGTERM; the mesh may differ; off by default
    #[arg(long, requires = "out")]
    pub resume: bool,

    /// Directory for loss.svg, metrics.jsonl, summary.json and trace.json (for ui.perfetto.dev),
    /// for warnings.jsonl if there are warnings, and for flight/, with the last operations of each
    /// rank, if a rank panics, is late, or leaves others waiting; one run at a time writes to it,
    /// and holds the lock on run.lock in it; by default no file is written
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// The way in which ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[non_exhaustive]
pub enum Comm {
    /// Threads of this process.
    Threads,
    /// Processes that mpirun has started (needs a build with --features mpi).
    Mpi,
    /// Processes on GPUs that `hsdp launch --comm nccl` or torchrun has started (needs a build with
    /// --features nccl).
    Nccl,
}

/// Options of a program that [evaluates](crate::Run::evaluate) its model during a run.
#[derive(Args, Clone, Debug, Default)]
pub struct EvaluationOptions {
    /// Evaluate the model after every STEPS steps and after the last one; off by default
    #[arg(long, value_name = "STEPS", value_parser = count::<1, { MAX_STEPS }>)]
    pub evaluate_every: Option<usize>,

    /// End the run when COUNT evaluations in a row have not improved on the best one; off by
    /// default
    #[arg(
        long, value_name = "COUNT", requires = "evaluate_every",
        value_parser = count::<1, { MAX_STEPS }>
    )]
    pub patience: Option<usize>,

    /// Save a checkpoint in DIR/best whenever an evaluation is the best one; off by default
    #[arg(long, requires = "evaluate_every", requires = "save_every")]
    pub save_best: bool,
}

impl Default for RunOptions {
    fn default() -> Self {
        #[derive(Parser)]
        struct Alone {
            #[command(flatten)]
            run: RunOptions,
        }
        Alone::parse_from([""]).run
    }
}

/// Refuses a value that an option's parser on the command line refuses. `value` is printed, and the
/// text is parsed.
fn check<T: Display>(
    option: &str,
    value: T,
    parser: fn(&str) -> Result<T, String>,
) -> Result<(), Failure> {
    let refused = |problem| Failure::Input(format!("{option} is {value}: {problem}"));
    parser(&value.to_string()).map(drop).map_err(refused)
}

/// Checks the value of an option, if it is set, by its parser on the command line.
fn check_count(
    option: &'static str,
    value: Option<usize>,
    parser: fn(&str) -> Result<usize, String>,
) -> Result<(), Failure> {
    value.map_or(Ok(()), |value| check(option, value, parser))
}

/// Refuses options that are set without another option that they need.
fn check_needed(set: &[(&str, bool)], needed: &str) -> Result<(), Failure> {
    let lacks = set.iter().find(|(_, is_set)| *is_set);
    lacks.map_or(Ok(()), |(option, _)| Err(Failure::Input(format!("{option} needs {needed}"))))
}

impl EvaluationOptions {
    /// Refuses values that the command line would refuse.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        check_count("--evaluate-every", self.evaluate_every, count::<1, MAX_STEPS>)?;
        check_count("--patience", self.patience, count::<1, MAX_STEPS>)?;
        let with_evaluations =
            [("--patience", self.patience.is_some()), ("--save-best", self.save_best)];
        match self.evaluate_every {
            None => check_needed(&with_evaluations, "--evaluate-every"),
            Some(_) => Ok(()),
        }
    }
}

impl RunOptions {
    /// Checks options that a program may have set in code, and the mesh. Chooses the device of this
    /// process: the processes of one machine take its devices in turn.
    ///
    /// # Errors
    /// [`Failure::Input`]
    pub(crate) fn of_process(&self) -> Result<Self, Failure> {
        self.check()?;
        let device = self.device.offloading(self.offload);
        let device = device.map_err(|problem| Failure::input(format!("--offload: {problem}")))?;
        if self.comm == Comm::Threads {
            threads::check(self.mesh.world_size(), threads::IN_EXAMPLES)
                .map_err(|problem| Failure::Input(format!("mesh {} has {problem}", self.mesh)))?;
            return Ok(Self { device, ..self.clone() });
        }
        let launched = Launched::from_env().map_err(Failure::input)?;
        let process_here = launched.and_then(|launched| launched.rank_here).unwrap_or(0);
        let device = device.dealt_to(process_here);
        let device = device.map_err(|problem| Failure::input(format!("--device: {problem}")))?;
        Ok(Self { device, ..self.clone() })
    }

    /// Refuses values that the command line would refuse.
    fn check(&self) -> Result<(), Failure> {
        check_count("--microbatches", Some(self.microbatches), count::<1, MAX_MICROBATCHES>)?;
        check_count("--prefetch", Some(self.prefetch), count::<0, MAX_UNITS>)?;
        check_count("--save-every", self.save_every, count::<1, MAX_STEPS>)?;
        check_count("--keep", Some(self.keep), count::<2, MAX_STEPS>)?;
        check_count("--norms-every", self.norms_every, count::<1, MAX_STEPS>)?;
        check("--deadline", self.deadline, seconds)?;
        let into_folder = [
            ("--save-every", self.save_every.is_some()),
            ("--norms-every", self.norms_every.is_some()),
            ("--resume", self.resume),
        ];
        match self.out {
            None => check_needed(&into_folder, "--out"),
            Some(_) => Ok(()),
        }
    }

    /// Describes the options that must be equal on all ranks. Their device numbers may differ.
    pub(crate) fn shared(&self) -> String {
        let alike = Self { device: Placement::Host, ..self.clone() };
        format!("{alike:?} on {}", self.device)
    }

    /// Returns the number of a microbatch, from 0, among those of all ranks in all steps: by step,
    /// then by microbatch, then by rank. The numbers of a step are the next ranks x microbatches
    /// ones, so a run that is resumed on another mesh goes on with the next number if this product
    /// is the same.
    #[must_use]
    pub fn number_of(&self, place: Place) -> u64 {
        let ranks = self.mesh.world_size() as u64;
        let microbatches = self.microbatches as u64;
        let in_step = place.microbatch as u64 * ranks + u64::from(place.rank.get());
        place.step * ranks * microbatches + in_step
    }

    /// Returns the number of ranks that run in this process.
    #[must_use]
    pub fn ranks_here(&self) -> usize {
        if self.comm == Comm::Threads { self.mesh.world_size() } else { 1 }
    }

    /// Returns the options of the world: its deadline, its faults and the folder of its flight
    /// records.
    #[must_use]
    pub fn world(&self) -> WorldOptions {
        let deadline = Duration::from_secs_f64(self.deadline);
        let flight_dir = self.out.as_ref().map(|out| out.join(FLIGHT));
        let late = self.late;
        let faults = self.faults.clone();
        WorldOptions { deadline, late, faults, flight_dir, ..Default::default() }
    }

    /// Returns the options that determine how the model is sharded and reduced. If a dtype is f16,
    /// the loss is scaled.
    #[must_use]
    pub fn model(&self) -> ModelOptions {
        let precision = Precision {
            parameters: self.param_dtype,
            wire: self.reduce_dtype,
            ..Precision::default()
        };
        // f16 ranges from 6e-8 to 65504. Loss scaling moves gradients into the middle of that
        // range.
        let loss_scaling = match [self.param_dtype, self.reduce_dtype].contains(&DType::F16) {
            true => {
                LossScaling::Dynamic(DynamicScale { initial: 1024.0, ..DynamicScale::default() })
            }
            false => LossScaling::Off,
        };
        ModelOptions {
            placement: self.device,
            precision,
            accumulation: self.accumulation,
            state: self.state_over,
            prefetch: self.prefetch,
            loss_scaling,
            ..ModelOptions::on(self.mesh)
        }
    }
}

/// Position of one microbatch in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the step, from 0.
    pub step: u64,
    /// Index of the microbatch in the step.
    pub microbatch: usize,
    /// Rank that computes the microbatch.
    pub rank: Rank,
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut RunOptions);

    fn refusal(checked: Result<(), Failure>) -> String {
        match checked {
            Err(Failure::Input(problem)) => problem,
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn options_made_in_code_have_the_bounds_of_the_command_line() {
        let options = RunOptions { out: Some("run".into()), ..RunOptions::default() };
        options.of_process().expect("the defaults are right");
        let changes: [(Change, &str); 10] = [
            (|it| it.norms_every = Some(0), "--norms-every is 0: expected a whole number from 1"),
            (|it| it.save_every = Some(0), "--save-every is 0: expected a whole number from 1"),
            (|it| it.keep = 1, "--keep is 1: expected a whole number from 2 to 1000000000"),
            (|it| it.microbatches = 0, "--microbatches is 0: expected a whole number from 1"),
            (|it| it.microbatches = 65537, "--microbatches is 65537: expected"),
            (|it| it.prefetch = 10_001, "--prefetch is 10001: expected a whole number from 0"),
            (|it| it.deadline = -1.0, "--deadline is -1: expected a number of seconds above 0"),
            (|it| it.deadline = f64::NAN, "--deadline is NaN: expected a number of seconds"),
            (|it| it.deadline = 1e300, "--deadline is 1000"),
            (|it| (it.resume, it.out) = (true, None), "--resume needs --out"),
        ];
        for (change, problem) in changes {
            let mut options = options.clone();
            change(&mut options);
            let refused = refusal(options.of_process().map(drop));
            assert!(refused.starts_with(problem), "{refused}");
        }
    }

    #[test]
    fn microbatches_of_all_ranks_are_numbered_one_after_the_other() {
        let numbers = |mesh: &str, microbatches: usize, step: u64| {
            let mesh: Mesh = mesh.parse().expect("a mesh");
            let options = RunOptions { mesh, microbatches, ..RunOptions::default() };
            let places = (0..microbatches).flat_map(|microbatch| {
                mesh.ranks().map(move |rank| Place { step, microbatch, rank })
            });
            places.map(|place| options.number_of(place)).collect::<Vec<_>>()
        };
        assert_eq!(numbers("2x2", 2, 0), (0..8).collect::<Vec<_>>());
        assert_eq!(numbers("2x2", 2, 3), (24..32).collect::<Vec<_>>());
        assert_eq!(numbers("1x2", 4, 3), numbers("2x2", 2, 3));
    }

    #[test]
    fn evaluations_have_the_bounds_of_the_command_line() {
        let none = EvaluationOptions::default();
        let every = Some(5);
        none.check().expect("the defaults are right");
        let all = EvaluationOptions { evaluate_every: every, patience: Some(1), save_best: true };
        all.check().expect("they are right");
        for (options, problem) in [
            (
                EvaluationOptions { evaluate_every: Some(0), ..none.clone() },
                "--evaluate-every is 0: expected a whole number from 1 to 1000000000",
            ),
            (
                EvaluationOptions { patience: Some(0), ..all },
                "--patience is 0: expected a whole number from 1 to 1000000000",
            ),
            (
                EvaluationOptions { patience: Some(2), ..none.clone() },
                "--patience needs --evaluate-every",
            ),
            (EvaluationOptions { save_best: true, ..none }, "--save-best needs --evaluate-every"),
        ] {
            assert_eq!(refusal(options.check()), problem);
        }
    }
}
