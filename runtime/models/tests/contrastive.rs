//! The example as a program: it learns, and names errors of its input.

mod common;

use std::process::Output;

use common::example;

fn run(arguments: &[&str]) -> Output {
    example("contrastive").args(arguments).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{error}", output.status);
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[test]
fn it_learns_and_says_the_same_each_time() {
    let said = [(); 2].map(|()| stdout(&run(&["--steps", "60"])));
    assert_eq!(said[0], said[1]);
    let found: Vec<f64> = said[0]
        .lines()
        .filter_map(|line| line.strip_suffix(" %")?.split_whitespace().last()?.parse().ok())
        .collect();
    assert_eq!(found.len(), 10, "{}", said[0]);
    assert!(found[9] > found[0] + 20.0, "{found:?}");
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let cases: [(&[&str], &str); 7] = [
        (&["--ranks", "3"], "a batch of 64 pairs cannot be shared evenly by 3 ranks"),
        (&["--ranks", "65", "--batch", "65"], "65 ranks: at most 64"),
        (&["--ranks", "1", "--batch", "1"], "at least 2"),
        (&["--ranks", "0"], "--ranks"),
        (&["--dtype", "f16"], "--dtype"),
        (&["--steps", "many"], "many"),
        (&["--colour", "blue"], "--colour"),
    ];
    for (arguments, phrase) in cases {
        let output = run(arguments);
        let message = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{arguments:?}: {message}");
        assert!(message.contains(phrase), "{arguments:?}: {message}");
    }
}
