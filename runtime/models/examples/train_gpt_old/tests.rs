//! `--verify` can fail: it finds the errors that a sharded run might make, and ends with exit code 1.

use std::fs;
use std::process::ExitCode;

use candle_core::Device;
use clap::Parser as _;
use hsdp::{ByteCount, Flow, NonFiniteGradient, Origin, Rank, Verdict};
use hsdp_models::gpt::{Gpt, GptConfig};
use hsdp_train::Warnings;
use tempfile::TempDir;

use super::inputs;
use super::options::Options;
use super::recipe;
use super::shared::costs::{Compared, Costs, check_traffic};
use super::shared::ending::Ended;
use super::shared::failure::Failure;
use super::shared::markdown::read_markdown;
use super::shared::signals::Signals;
use super::shared::trace;
use super::text::Corpus;
use super::train::Job;
use super::unsharded::{Summed, Tensors, Unsharded};
use super::verify::{Sharded, Twin};

/// The name of a parameter to whose gradient every microbatch contributes.
const NAME: &str = "h.0.mlp.fc.weight";

/// The line of which most texts here consist.
const LINE: &str = "she sells sea shells by the sea shore. ";

/// Runs `test` with a job of one step on four ranks.
fn with_job(arguments: &[&str], test: impl FnOnce(&Job<'_>)) {
    with_text(LINE, arguments, test);
}

/// The same, on a text of other lines, in a file of its own.
fn with_text(line: &str, arguments: &[&str], test: impl FnOnce(&Job<'_>)) {
    let folder = TempDir::new().expect("a folder");
    let text = folder.path().join("text");
    fs::write(&text, line.repeat(10)).expect("a file");
    let text = text.display().to_string();
    let small = ["train_gpt", "--data", &text, "--layers", "1", "--width", "8", "--heads", "2"];
    let context = ["--context", "8", "--verify"];
    let options = Options::try_parse_from([&small, &context[..], arguments].concat());
    let options = options.expect("options that make sense");
    let corpus = Corpus::read(&options).expect("a text");
    let (layers, width, heads, context) = (1, 8, 2, 8);
    let config = GptConfig { vocab: corpus.vocabulary(), context, width, heads, layers };
    let gpt = Gpt::new(config).expect("sizes that fit");
    let (signals, warnings) = (Signals::default(), &Warnings::of("test"));
    test(&Job { options: &options, corpus: &corpus, gpt, signals, warnings });
}

/// The loss and gradients of a correct run in its first step.
fn faultless(job: &Job<'_>) -> Summed {
    Unsharded::new(job).gradients((job, &Device::Cpu), 0).expect("a step of the model")
}

/// The twin after it has checked a first step whose loss and gradients `tamper` has changed.
fn check(
    job: &Job<'_>,
    verdict: &Verdict,
    tamper: impl FnOnce(&mut f64, &mut Tensors),
) -> Result<Twin, Failure> {
    let summed = faultless(job);
    let (mut loss, mut gradients) = (summed.loss(), summed.gradients());
    tamper(&mut loss, &mut gradients);
    let sharded = Sharded { loss, norm: summed.norm(), verdict, gradients: &gradients };
    let mut twin = Twin::new(job);
    twin.check((job, &Device::Cpu), &sharded)?;
    twin.follow(Unsharded::new(job).parameters().clone()).map(|()| twin)
}

/// Asserts that `outcome` is a disagreement whose text contains `phrase`, and that the program ends with exit code 1.
#[track_caller]
fn disagrees<T>(outcome: Result<T, Failure>, phrase: &str) {
    let Err(failure) = outcome else { panic!("the twin agrees, although `{phrase}` is wrong") };
    assert!(matches!(failure, Failure::Disagreement(_)), "{failure}");
    assert!(failure.to_string().contains(phrase), "{failure}");
    let [got, want] = [failure.exit_code(), ExitCode::from(1)].map(|code| format!("{code:?}"));
    assert_eq!(got, want);
}

fn first(gradients: &mut Tensors) -> &mut f32 {
    &mut gradients.get_mut(NAME).expect("the model has it")[0]
}

#[test]
fn one_wrong_bit_is_found_where_nothing_may_differ() {
    with_job(&[], |job| {
        let flipped = check(job, &Verdict::Apply, |_, gradients| {
            let value = first(gradients);
            *value = f32::from_bits(value.to_bits() ^ 1);
        });
        disagrees(flipped, "h.0.mlp.fc.weight[0]");
    });
}

#[test]
fn a_wrong_gradient_is_found_where_the_wire_rounds() {
    with_job(&["--reduce-dtype", "f16"], |job| {
        let scaled = |by: f32| {
            move |_: &mut f64, gradients: &mut Tensors| {
                gradients.values_mut().flatten().for_each(|value| *value *= by);
            }
        };
        let twin = check(job, &Verdict::Apply, scaled(1.0 + 1e-5)).expect("within the bound");
        let said = twin.verified().expect("one step was compared").to_string();
        assert!(said.contains("of 1 steps within 0.0") && !said.contains("0.00"), "{said}");
        // A factor of two on one axis, as from a wrong divisor; a smaller factor; and NaN.
        disagrees(check(job, &Verdict::Apply, scaled(2.0)), "the gradient of h.0");
        disagrees(check(job, &Verdict::Apply, scaled(1.02)), "the gradient of h.0");
        let not_a_number = |_: &mut f64, gradients: &mut Tensors| *first(gradients) = f32::NAN;
        disagrees(check(job, &Verdict::Apply, not_a_number), NAME);
    });
}

#[test]
fn a_wrong_loss_and_a_missing_gradient_are_found() {
    with_job(&["--reduce-dtype", "bf16"], |job| {
        let next = check(job, &Verdict::Apply, |loss, _| *loss = loss.next_up());
        disagrees(next, "loss is");
        let missing = check(job, &Verdict::Apply, |_, gradients| drop(gradients.remove(NAME)));
        disagrees(missing, "there is no gradient of h.0.mlp.fc.weight");
    });
}

#[test]
fn wrong_parameters_after_an_update_are_found() {
    with_job(&[], |job| {
        let mut twin = Twin::new(job);
        let summed = faultless(job);
        let (norm, gradients) = (summed.norm(), &summed.gradients());
        let sharded = Sharded { loss: summed.loss(), norm, verdict: &Verdict::Apply, gradients };
        twin.check((job, &Device::Cpu), &sharded).expect("the same numbers");
        // As if no rank had updated anything.
        disagrees(twin.follow(Unsharded::new(job).parameters().clone()), "parameter h.0");
    });
}

#[test]
fn a_run_of_skipped_steps_verifies_nothing() {
    with_job(&["--reduce-dtype", "f16"], |job| {
        let (parameter, rank, microbatch) = (NAME.to_owned(), Rank::new(0), 0);
        let origin = Origin::Gradient { parameter, rank, microbatch };
        let verdict = Verdict::Skip(NonFiniteGradient { step: 0, origin });
        let twin = check(job, &verdict, |_, gradients| gradients.clear()).expect("a skipped step");
        disagrees(twin.verified(), "no gradient was compared: all 1 steps were skipped");
    });
}

#[test]
fn traffic_that_is_not_as_planned_is_found() {
    let costs = |bytes: u64| {
        let flow = |bytes| Flow { calls: 8, bytes: ByteCount(bytes) };
        let compared = Compared { planned: flow(4096), measured: flow(bytes) };
        Costs { traffic: vec![("all_gather", compared)], memory: Vec::new() }
    };
    assert!(check_traffic(&[costs(4096), costs(4096)]).is_ok());
    disagrees(check_traffic(&[costs(4096), costs(4095)]), "not as planned on 1 of 2 ranks");
}

#[test]
fn the_ranks_wait_for_the_twin_of_rank_0() {
    with_job(&[], |job| {
        let day = std::time::Duration::from_hours(24);
        assert!(recipe::world(job.options).deadline > day);
        let unverified = Options { verify: false, ..job.options.clone() };
        assert!(recipe::world(&unverified).deadline < day);
    });
}

/// The failures of two ranks with these jobs: rank 0 reports one, and rank 1 must be silent.
fn agreed(jobs: [Result<&Job<'_>, &Failure>; 2], options: &Options) -> [Option<String>; 2] {
    let ends = hsdp::world(2, |world| {
        let rank = world.rank().index();
        match (inputs::agree(&world, options, jobs[rank]), rank) {
            (Ok(_), _) => None,
            (Err(Failure::Input(what)), 0) => Some(what),
            (Err(Failure::Elsewhere), 1) => Some(String::new()),
            (Err(failure), _) => panic!("rank {rank}: {failure}"),
        }
    });
    ends.try_into().expect("two ranks")
}

#[test]
fn ranks_with_other_texts_of_one_vocabulary_do_not_train() {
    let other = LINE.replace("by the", "yb the");
    with_job(&[], |one| {
        with_text(&other, &[], |two| {
            let [first, second] = agreed([Ok(one), Ok(two)], one.options);
            let said = first.expect("they differ");
            let text = "390 bytes with hash ";
            let expected = format!("ranks 0 and 1 differ in their text: {text}");
            assert!(said.starts_with(&expected), "{said}");
            assert_eq!((said.matches(text).count(), second.as_deref()), (2, Some("")), "{said}");
        });
    });
}

#[test]
fn ranks_with_one_text_at_two_paths_train() {
    with_job(&[], |one| {
        with_job(&[], |two| {
            assert_ne!(one.options.data, two.options.data);
            let shared = [one, two].map(|job| job.options.shared());
            assert_eq!(shared[0], shared[1]);
            assert_eq!(agreed([Ok(one), Ok(two)], one.options), [None, None]);
        });
    });
}

#[test]
fn the_ranks_learn_the_problem_of_one_that_has_no_text() {
    with_job(&[], |one| {
        let problem = Failure::input("cannot read x");
        let expected = ["rank 1: cannot read x", ""].map(|said| Some(said.to_owned()));
        assert_eq!(agreed([Ok(one), Err(&problem)], one.options), expected);
        let expected = ["rank 0: cannot read x", ""].map(|said| Some(said.to_owned()));
        assert_eq!(agreed([Err(&problem), Ok(one)], one.options), expected);
        // All have it, which is no matter of one rank.
        let expected = ["cannot read x", ""].map(|said| Some(said.to_owned()));
        assert_eq!(agreed([Err(&problem); 2], one.options), expected);
    });
}

#[test]
fn a_run_that_ends_early_fails_in_the_process_of_rank_0_alone() {
    with_job(&[], |job| {
        for (was_stopped, unsaved) in [(true, None), (false, Some("full")), (true, Some("full"))] {
            let unsaved = unsaved.map(str::to_owned);
            let ended = Ended { steps: 3, was_stopped, unsaved };
            let outcome = ended.outcome(&job.signals, false);
            assert!(matches!(outcome, Err(Failure::Elsewhere)), "{outcome:?}");
        }
        let ended = Ended { steps: 3, was_stopped: false, unsaved: None };
        assert!(ended.outcome(&job.signals, false).is_ok());
    });
}

#[cfg(unix)]
#[test]
fn the_default_text_is_of_regular_files_with_a_bound_on_their_sum() {
    let folder = TempDir::new().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    for folder in ["b", "target", ".hidden", "folder.md"] {
        fs::create_dir(path(folder)).expect("a folder");
    }
    for name in ["c.md", "b/a.md", "a.md", "a.txt", "target/a.md", ".hidden/a.md", "folder.md/d.md"]
    {
        fs::write(path(name), name).expect("written");
    }
    // A read of it would not be of this text, or never end.
    std::os::unix::fs::symlink("/dev/zero", path("zero.md")).expect("a link");
    let fifo = std::process::Command::new("mkfifo").arg(path("fifo.md")).status();
    assert!(fifo.expect("it starts").success());
    let text = "a.md\nb/a.md\nc.md\nfolder.md/d.md";
    let most = text.len() as u64;
    assert_eq!(read_markdown(folder.path(), most).expect("a text"), text);
    let refused = read_markdown(folder.path(), most - 1).expect_err("too long").to_string();
    assert!(refused.ends_with(&format!("have more than {} bytes together", most - 1)), "{refused}");
}

#[test]
fn a_trace_that_is_gone_is_named() {
    let folder = TempDir::new().expect("a folder");
    let lost = trace::keep(&folder.path().join("trace.json")).expect_err("there is none");
    assert!(lost.to_string().contains("trace.json: No such file"), "{lost}");
}
