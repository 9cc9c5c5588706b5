//! The twin finds the errors that a sharded run might make.

use std::process::ExitCode;

use clap::Parser as _;
use hsdp::{NonFiniteGradient, Origin, Rank, Verdict};

use super::*;
use crate::gpt::unsharded::{Summed, Tensors, Unsharded};

/// The name of a parameter to whose gradient every microbatch contributes.
const NAME: &str = "h.0.mlp.fc.weight";

/// Runs `test` with a job of one step on four ranks.
fn with_job(arguments: &[&str], test: impl FnOnce(Job<'_>)) {
    let small = ["verify", "--layers", "1", "--width", "8", "--heads", "2", "--context", "8"];
    let options = Options::try_parse_from([&small, arguments].concat());
    let options = &options.expect("options that make sense");
    let text = "she sells sea shells by the sea shore. ".repeat(10);
    let inputs = &Inputs::new(options, &text).expect("a text");
    test(Job { options, inputs, device: Device::Cpu });
}

/// Returns the loss and gradients of a correct run in its first step.
fn faultless(job: &Job<'_>) -> Summed {
    Unsharded::new(job).gradients(job, 0).expect("a step of the model")
}

/// Returns the twin after it has checked a first step whose loss and gradients `tamper` has
/// changed.
fn check<'a>(
    job: &Job<'a>,
    verdict: &Verdict,
    tamper: impl FnOnce(&mut f64, &mut Tensors),
) -> Result<Twin<'a>, Failure> {
    let summed = faultless(job);
    let mut loss = summed.loss();
    let mut gradients = summed.gradients();
    tamper(&mut loss, &mut gradients);
    let sharded = Sharded { loss, norm: summed.norm(), verdict, gradients: &gradients };
    let mut twin = Twin::new(job.clone());
    twin.check(&sharded)?;
    twin.follow(Unsharded::new(job).parameters().clone()).map(|()| twin)
}

/// Asserts that `outcome` is a disagreement whose text contains `phrase`, and that the program ends
/// with exit code 1.
#[track_caller]
fn disagrees<T>(outcome: Result<T, Failure>, phrase: &str) {
    let Err(failure) = outcome else { panic!("the twin agrees, although `{phrase}` is wrong") };
    assert!(matches!(failure, Failure::Disagreement(_)), "{failure}");
    let said = failure.to_string();
    assert!(said.starts_with("verification failed: ") && said.contains(phrase), "{said}");
    let [got, want] = [failure.exit_code(), ExitCode::from(1)].map(|code| format!("{code:?}"));
    assert_eq!(got, want);
}

fn first(gradients: &mut Tensors) -> &mut f32 {
    &mut gradients.get_mut(NAME).expect("the model has it")[0]
}

#[test]
fn one_wrong_bit_is_found_where_nothing_may_differ() {
    with_job(&[], |job| {
        let flipped = check(&job, &Verdict::Apply, |_, gradients| {
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
        let twin = check(&job, &Verdict::Apply, scaled(1.0 + 1e-5)).expect("within the bound");
        let said = twin.verified().expect("one step was compared").to_string();
        assert!(said.contains("of 1 steps within 0.0") && !said.contains("0.00"), "{said}");
        // A factor of two on one axis, as from a wrong divisor; a smaller factor; and NaN.
        disagrees(check(&job, &Verdict::Apply, scaled(2.0)), "the gradient of h.0");
        disagrees(check(&job, &Verdict::Apply, scaled(1.02)), "the gradient of h.0");
        let not_a_number = |_: &mut f64, gradients: &mut Tensors| *first(gradients) = f32::NAN;
        disagrees(check(&job, &Verdict::Apply, not_a_number), NAME);
    });
}

#[test]
fn a_wrong_loss_and_a_missing_gradient_are_found() {
    with_job(&["--reduce-dtype", "bf16"], |job| {
        let next = check(&job, &Verdict::Apply, |loss, _| *loss = loss.next_up());
        disagrees(next, "loss is");
        let missing = check(&job, &Verdict::Apply, |_, gradients| drop(gradients.remove(NAME)));
        disagrees(missing, "there is no gradient of h.0.mlp.fc.weight");
    });
}

#[test]
fn wrong_parameters_after_an_update_are_found() {
    with_job(&[], |job| {
        let summed = faultless(&job);
        let norm = summed.norm();
        let gradients = &summed.gradients();
        let sharded = Sharded { loss: summed.loss(), norm, verdict: &Verdict::Apply, gradients };
        let mut twin = Twin::new(job.clone());
        twin.check(&sharded).expect("the same numbers");
        // These are the parameters before any update.
        disagrees(twin.follow(Unsharded::new(&job).parameters().clone()), "parameter h.0");
    });
}

#[test]
fn a_run_of_skipped_steps_verifies_nothing() {
    with_job(&["--reduce-dtype", "f16"], |job| {
        let parameter = NAME.to_owned();
        let rank = Rank::new(0);
        let microbatch = 0;
        let origin = Origin::Gradient { parameter, rank, microbatch };
        let verdict = Verdict::Skip(NonFiniteGradient { step: 0, origin });
        let twin = check(&job, &verdict, |_, gradients| gradients.clear()).expect("a skipped step");
        disagrees(twin.verified(), "no gradient was compared: all 1 steps were skipped");
    });
}

#[test]
fn ranks_do_not_warn_while_they_wait_for_the_twin_and_keep_their_deadline() {
    let run = RunOptions { deadline: 7.0, ..RunOptions::default() };
    let world = patient(&run).world();
    assert!(world.late > Duration::from_hours(24), "{world:?}");
    assert_eq!(world.deadline, Duration::from_secs(7));
}
