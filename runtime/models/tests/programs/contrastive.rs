//! `contrastive` as a program: it learns, and names errors of its input.

use hsdp_train::testing::refusal;

use crate::{example, stdout};

#[test]
fn it_learns_and_says_the_same_each_time() {
    let run = || example("contrastive").args(["--steps", "60"]).output();
    let said = [(); 2].map(|()| stdout(&run().expect("the program starts")));
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
        let message = refusal(example("contrastive").args(arguments));
        assert!(message.contains(phrase), "{arguments:?}: {message}");
    }
}
