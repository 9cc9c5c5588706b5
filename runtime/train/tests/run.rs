//! Programs of this crate: their warnings, refusals and exit codes.
//!
//! The test program is also the program under test: it trains if `HSDP_TEST_PART` is set.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use clap::Parser;
use hsdp::prelude::*;
use hsdp_train::{EvaluationOptions, Failure, Place, Ranks, RunOptions, Training};
use libtest_mimic::{Arguments, Trial};
use tempfile::TempDir;

const PART: &str = "HSDP_TEST_PART";

/// The only unit of the model.
const UNIT: UnitId = UnitId::new(0);

fn main() -> ExitCode {
    if let Ok(part) = env::var(PART) {
        return match part.as_str() {
            "twice" => hsdp_train::main("rows", |it: &Twice| &it.own.run, |_, _| Ok(())),
            part => {
                hsdp_train::main("rows", |it: &Own| &it.run, |own, ranks| play(part, own, ranks))
            }
        };
    }
    /// Names a trial of each function.
    macro_rules! trials {
        ($($name:ident),* $(,)?) => {
            vec![$(Trial::test(stringify!($name), || { $name(); Ok(()) })),*]
        };
    }
    let trials = trials![
        an_evaluation_that_is_nan_is_a_warning_with_its_step,
        an_evaluation_that_is_due_must_be_made,
        steps_whose_lines_are_lost_are_named,
        inputs_that_cannot_be_read_are_bad_input,
        a_panic_while_inputs_are_read_stays_one,
        an_option_with_the_name_of_another_is_refused,
        a_file_is_no_folder,
        the_table_has_the_name_of_the_program,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

#[derive(Parser)]
struct Own {
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    evaluation: EvaluationOptions,
    #[arg(long, default_value_t = 6)]
    steps: usize,
}

#[derive(Parser)]
struct Twice {
    #[command(flatten)]
    own: Own,
    #[arg(id = "own-keep", long = "keep")]
    _keep: bool,
}

/// Trains a model whose gradients are constant, with the fault that `part` names.
fn play(part: &str, own: &Own, ranks: &Ranks) -> Result<(), Failure> {
    let read = || match part {
        "unread" => Err(io::Error::other("the file is torn"))?,
        "panic" => panic!("the file is torn"),
        _ => Ok(()),
    };
    ranks.run(read, |setup, ()| {
        let spec = ModelSpec::new().unit(Unit::new("layer").param(Param::new("w", [4])));
        let init = |_: &Param| vec![1.0; 4];
        let model = ShardedModel::new(setup.world(), spec, setup.model_options(), init)?;
        let sgd = Sgd::new(&model, SgdOptions::default());
        let evaluation = own.evaluation.clone();
        let training = Training { evaluation, ..Training::of_steps(own.steps) };
        let mut run = setup.start(model, sgd, training)?;
        while run.next_step()?.is_some() {
            let gradients = run.gradients(microbatch)?;
            run.update(|model, sgd| sgd.step(model, gradients))?;
            let value = if part == "nan" { f64::NAN } else { 1.0 };
            if part != "unevaluated" {
                run.evaluate(|_, _| Ok::<_, Failure>(value))?;
            }
        }
        run.finish()
    })
}

fn microbatch(mut pass: Pass<'_>, _: Place) -> Result<(), hsdp::Error> {
    drop(pass.unshard(UNIT)?);
    let _seed = pass.loss(LossSum::new(1.0, 1))?;
    drop(pass.unshard(UNIT)?);
    pass.reduce(UNIT, UnitGradients::of([vec![1.0_f32; 4]]))?;
    pass.finish()
}

/// A folder for runs of the program.
struct Folder(TempDir);

/// The end of a run: its exit code and its output.
struct End {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Folder {
    fn new() -> Self {
        Self(TempDir::new().expect("a folder"))
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("run")
    }

    fn metrics(&self) -> PathBuf {
        self.out().join("metrics.jsonl")
    }

    fn run(&self, part: &str, arguments: &[&str]) -> End {
        let mut program = Command::new(env::current_exe().expect("a path"));
        program.env(PART, part).env_remove("RUST_BACKTRACE").args(["--mesh", "1x2", "--out"]);
        let ended = program.arg(self.out()).args(arguments).output().expect("it starts");
        let Output { status, stdout, stderr } = ended;
        let [stdout, stderr] = [stdout, stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
        End { code: status.code(), stdout, stderr }
    }
}

/// Asserts that a run has ended with an exit code, and with these lines alone on stderr.
fn ended(end: &End, code: i32, lines: &[&str]) {
    let End { code: its, stderr, .. } = end;
    assert_eq!((*its, stderr.lines().collect::<Vec<_>>()), (Some(code), lines.to_vec()));
}

fn an_evaluation_that_is_nan_is_a_warning_with_its_step() {
    let folder = Folder::new();
    let warning = |step: u64| {
        format!("rows: warning: the evaluation after step {step} is NaN, and counts as not better")
    };
    let end = folder.run("nan", &["--evaluate-every", "2", "--patience", "2"]);
    ended(&end, 0, &[&warning(2), &warning(4)]);
    assert!(end.stdout.contains("ended after step 4 of 6"), "{}", end.stdout);
    let kept = fs::read_to_string(folder.out().join("warnings.jsonl")).expect("a file");
    assert_eq!(kept.lines().count(), 2, "{kept}");
}

fn an_evaluation_that_is_due_must_be_made() {
    let end = Folder::new().run("unevaluated", &["--evaluate-every", "2"]);
    let first = "rows: training failed: next_step was called out of order: call evaluate, which is \
                 due after step 2, before it";
    assert_eq!((end.code, end.stderr.lines().next()), (Some(1), Some(first)), "{}", end.stderr);
    ended(&Folder::new().run("unevaluated", &[]), 0, &[]);
}

fn steps_whose_lines_are_lost_are_named() {
    let folder = Folder::new();
    let metrics = folder.metrics();
    let saving = ["--save-every", "2"];
    let resumed = ["--save-every", "2", "--resume", "--steps"];
    ended(&folder.run("", &saving), 0, &[]);
    let text = fs::read_to_string(&metrics).expect("a file");
    let lines: Vec<&str> = text.lines().collect();
    let warning = |steps: &str| {
        let path = metrics.display();
        format!(
            "rows: warning: {path} has no lines of steps that were made before this run: {steps}"
        )
    };
    // The last line is torn.
    let torn = [&lines[..2], &lines[4..5], &[&lines[5][..20]]].concat().join("\n");
    fs::write(&metrics, torn).expect("written");
    let end = folder.run("", &[&resumed[..], &["8"]].concat());
    ended(&end, 0, &[&warning("2 to 3, 5"), "rows: resumes after step 6"]);
    fs::remove_file(&metrics).expect("removed");
    let end = folder.run("", &[&resumed[..], &["10"]].concat());
    ended(&end, 0, &[&warning("0 to 7"), "rows: resumes after step 8"]);
    // The file begins at step 8.
    let end = folder.run("", &[&resumed[..], &["12"]].concat());
    ended(&end, 0, &[&warning("0 to 7"), "rows: resumes after step 10"]);
}

fn inputs_that_cannot_be_read_are_bad_input() {
    ended(&Folder::new().run("unread", &[]), 2, &["rows: the file is torn"]);
}

fn a_panic_while_inputs_are_read_stays_one() {
    let end = Folder::new().run("panic", &[]);
    assert_eq!(end.code, Some(101), "{}", end.stderr);
}

fn an_option_with_the_name_of_another_is_refused() {
    for arguments in [&["--keep", "3"][..], &["--help"]] {
        let end = Folder::new().run("twice", arguments);
        let told = "rows: two options of this program have the name --keep: rename one of them";
        ended(&end, 1, &[told]);
    }
}

fn a_file_is_no_folder() {
    let folder = Folder::new();
    fs::write(folder.out(), "mine").expect("written");
    let end = folder.run("", &[]);
    let out = folder.out();
    let told = format!("rows: cannot write to {}: it exists, and is no folder", out.display());
    ended(&end, 2, &[&told]);
    assert_eq!(fs::read(Path::new(&out)).expect("it is there"), b"mine");
}

fn the_table_has_the_name_of_the_program() {
    let end = Folder::new().run("", &[]);
    let title = end.stdout.lines().nth(1).unwrap_or_default();
    assert!(title.starts_with("│ rows ") && title.contains("6 steps on mesh 1x2"), "{title}");
}
