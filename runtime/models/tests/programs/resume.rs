//! `train_gpt` as a program that ends early and is resumed.

use nix::sys::signal::Signal;

use crate::place::{Place, ended_well, numbers, saved};
use crate::{example, stderr};

#[test]
fn a_run_that_is_killed_again_and_again_has_the_losses_of_one_that_is_not() {
    let recipe = ["--steps", "150", "--save-every", "10"];
    let undisturbed = Place::new();
    ended_well(&undisturbed.run(&recipe));
    let expected = undisturbed.steps();
    assert_eq!(expected.len(), 150);

    let place = Place::new();
    let resumed = [&recipe[..], &["--resume"]].concat();
    for (turn, at) in [3, 27, 60, 61, 111].into_iter().enumerate() {
        // The first one has nothing to resume from.
        let mut run = place.start(if turn == 0 { &recipe } else { &resumed });
        place.wait_for(at, &mut run);
        run.send(Signal::SIGKILL);
        run.ended();
    }
    ended_well(&place.run(&resumed));
    assert_eq!(place.steps(), expected);
    assert_eq!(saved(&place.out()), ["step-00000140", "step-00000150"]);
}

#[test]
fn row_43_sigterm_ends_the_step_on_all_ranks_and_saves() {
    let place = Place::new();
    let recipe = ["--steps", "1000000", "--save-every", "1000000"];
    let mut run = place.start(&recipe);
    place.wait_for(5, &mut run);
    run.send(Signal::SIGTERM);
    let ended = run.ended();
    let said = stderr(&ended);
    assert_eq!(ended.status.code(), Some(143), "{said}");
    let steps = place.steps().len();
    assert!(
        said.ends_with(&format!("train_gpt: stopped by signal 15 after step {steps}\n")),
        "{said}"
    );
    assert_eq!(saved(&place.out()), [format!("step-{steps:08}")]);

    let more = (steps + 3).to_string();
    ended_well(&place.run(&["--steps", &more, "--resume"]));
    assert_eq!(numbers(&place.steps()), (0..steps as u64 + 3).collect::<Vec<_>>());
}

#[test]
fn another_mesh_goes_on() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "6", "--save-every", "2", "--mesh", "2x2"]));
    for (steps, mesh) in [("8", "1x3"), ("10", "3x1"), ("12", "1x1")] {
        let arguments = ["--steps", steps, "--save-every", "2", "--mesh", mesh, "--resume"];
        ended_well(&place.run(&arguments));
    }
    assert_eq!(numbers(&place.steps()), (0..12).collect::<Vec<_>>());
}

#[test]
fn without_a_checkpoint_a_run_begins_and_with_another_seed_it_does_not() {
    let place = Place::new();
    ended_well(&place.run(&["--steps", "2", "--save-every", "2", "--resume"]));
    assert_eq!(numbers(&place.steps()), [0, 1]);
    let refused = place.run(&["--steps", "4", "--resume", "--seed", "2"]);
    let told =
        "train_gpt: --resume: the checkpoint of step 2 was made with seed 1, this run has 2\n";
    assert_eq!(stderr(&refused), told);
    assert_eq!(refused.status.code(), Some(2));
    assert_eq!(numbers(&place.steps()), [0, 1], "the run's files are as they were");
    let refused = example("train_gpt").arg("--resume").output().expect("the program starts");
    let told = "train_gpt: the following required arguments were not provided: --out <DIR>\n";
    assert_eq!(stderr(&refused), told);
}

#[test]
fn a_run_that_has_ended_says_so_and_its_files_stay() {
    let place = Place::new();
    let recipe = ["--steps", "3", "--save-every", "2", "--resume"];
    ended_well(&place.run(&recipe));
    let files = || {
        let mut files = place.files();
        // It names the process.
        files.remove("run.lock");
        files
    };
    let before = files();
    let again = place.run(&recipe);
    ended_well(&again);
    assert_eq!(String::from_utf8_lossy(&again.stdout), "all 3 steps are made\n");
    assert_eq!(files(), before);
    // A run that is refused leaves them, too.
    assert_eq!(place.run(&[&recipe[..], &["--seed", "2"]].concat()).status.code(), Some(2));
    assert_eq!(files(), before);
}
