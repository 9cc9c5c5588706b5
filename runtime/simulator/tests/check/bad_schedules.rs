//! Schedules that cannot be judged: each mistake is an error with its place.

use hsdp_sharding::Rank;
use hsdp_simulator::{Error, Issue, Schedules};

fn error_of(text: &str) -> String {
    Schedules::from_json(text).expect_err("it is refused").to_string()
}

/// The error of two ranks of which rank 0 has these actions.
fn of_actions(actions: &str) -> String {
    let communicators = r#"{"world": [0, 1], "one": [1]}"#;
    error_of(&format!(
        r#"{{"communicators": {communicators}, "kernels": 0, "schedules": [[{actions}], []]}}"#
    ))
}

fn of_communicators(communicators: &str) -> String {
    error_of(&format!(
        r#"{{"communicators": {communicators}, "kernels": 0, "schedules": [[], [], []]}}"#
    ))
}

const ISSUE: &str =
    r#"{"comm": "world", "op": "all_gather", "dtype": "f32", "count": 1, "stream": 0}"#;

#[test]
fn waits_are_for_operations_before() {
    let all = [
        (
            r#"{"wait": 0}"#.to_owned(),
            "schedules[0][0]: it waits for action 0, which is the wait itself",
        ),
        (r#"{"wait": 7}"#.to_owned(), "schedules[0][0]: it waits for action 7, which comes later"),
        (
            format!(r#"{{"wait": 1}}, {ISSUE}"#),
            "schedules[0][0]: it waits for action 1, which comes later",
        ),
        (
            format!(r#"{ISSUE}, {{"wait": 0}}, {{"wait": 1}}"#),
            "schedules[0][2]: it waits for action 1, which is a wait",
        ),
    ];
    for (actions, expected) in all {
        assert_eq!(of_actions(&actions), expected, "{actions}");
    }
}

#[test]
fn operations_are_of_members() {
    let on = |comm: &str| format!("{ISSUE}, {}", ISSUE.replace("world", comm));
    assert_eq!(of_actions(&on("shard7")), "schedules[0][1]: there is no communicator \"shard7\"");
    assert_eq!(of_actions(&on("one")), "schedules[0][1]: rank 0 is no member of one");
}

#[test]
fn communicators_have_ranks_that_exist_once() {
    let twice = r#"{"a": [0, 1], "b": [], "a": [2]}"#;
    for (communicators, expected) in [
        (r#"{"a": [0, 1, 0]}"#, "communicators.a: rank 0 is listed twice"),
        (r#"{"a": [0, 3]}"#, "communicators.a: rank 3 of 3 ranks"),
        (twice, "communicators.a: there are two communicators of this name"),
        (r#"{"a\nb": [0]}"#, "communicators: the name \"a\\nb\" has the control character '\\n'"),
    ] {
        assert_eq!(of_communicators(communicators), expected, "{communicators}");
    }
    let long = format!(r#"{{"{}": [0]}}"#, "a".repeat(1025));
    let expected = "communicators: a name has 1025 bytes; at most 1024 are allowed";
    assert_eq!(of_communicators(&long), expected);
}

#[test]
fn the_place_of_a_wrong_field_is_named() {
    for (actions, expected) in [
        (ISSUE.replace(r#""count": 1, "#, ""), "schedules[0][0]: `count` is missing"),
        (
            ISSUE.replace('1', "-1"),
            "schedules[0][0].count: invalid value: integer `-1`, expected u64",
        ),
        (
            ISSUE.replace(r#""f32""#, "32"),
            "schedules[0][0].dtype: invalid type: integer `32`, expected a string",
        ),
        (ISSUE.replace(r#""op""#, r#""kind""#), "schedules[0][0].kind: unknown field `kind`"),
        (ISSUE.replace('}', r#", "wait": 0}"#), "schedules[0][0]: a wait has no other field"),
        (
            ISSUE.replace("all_", "all\\u0007"),
            "schedules[0][0]: the name \"all\\u{7}gather\" has the control character",
        ),
        ("7".to_owned(), "schedules[0][0]: invalid type: integer `7`, expected an object"),
        (
            r#"["world", "all_gather", "f32", 1, 0]"#.to_owned(),
            "schedules[0][0]: invalid type: sequence, expected an object",
        ),
    ] {
        let error = of_actions(&actions);
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn other_json_is_refused() {
    for (text, expected) in [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("[]", "invalid type: sequence, expected an object at line 1 column 0"),
        (r#"[{}, 0, []]"#, "invalid type: sequence, expected an object at line 1 column 0"),
        ("{}", "missing field `communicators` at line 1 column 2"),
        (
            r#"{"communicators": {}, "kernels": 0, "schedules": []} x"#,
            "trailing characters at line 1 column 54",
        ),
        (
            r#"{"communicators": {}, "kernels": -1, "schedules": []}"#,
            "kernels: invalid value: integer `-1`, expected u32 at line 1 column 35",
        ),
        (
            r#"{"communicators": {}, "kernels": 0, "streams": 4}"#,
            "streams: unknown field `streams`, expected one of `communicators`, `kernels`, `schedules`, `mesh`, `expected` at line 1 column 45",
        ),
    ] {
        assert_eq!(error_of(text), expected, "{text}");
    }
    let fine = r#"{"mesh": [{"x": null}], "expected": 7, "kernels": 2, "schedules": [], "communicators": {}}"#;
    assert!(Schedules::from_json(fine).is_ok());
}

#[test]
fn ranks_have_a_bound() {
    let ranks = "[],".repeat(1 << 20);
    let text = format!(r#"{{"communicators": {{}}, "kernels": 0, "schedules": [{ranks}[]]}}"#);
    assert!(error_of(&text).contains("more than 1048576 ranks"));
    assert!(Schedules::new((1 << 20) + 1, None).is_err());
}

#[test]
fn communicators_have_a_bound() {
    let names = r#""":[],"#.repeat(1 << 20);
    let text = format!(r#"{{"communicators": {{{names}"x": []}}, "kernels": 0, "schedules": []}}"#);
    assert!(error_of(&text).contains("more than 1048576 communicators"));
}

#[test]
fn members_have_a_bound() {
    let mut schedules = Schedules::new(1 << 20, None).expect("as many as may be");
    let ranks: Vec<Rank> = (0..1 << 20).map(Rank::new).collect();
    for name in ["a", "b", "c", "d"] {
        schedules.communicator(name, &ranks).expect("as many as may be");
    }
    let error = schedules.communicator("e", &ranks[..1]).expect_err("too many");
    assert_eq!(error.to_string(), "schedules: more than 4194304 members of communicators");
}

#[test]
fn actions_have_a_bound() {
    let mut schedules = Schedules::new(1, None).expect("few ranks");
    let rank = Rank::new(0);
    let communicator = schedules.communicator("a", &[rank]).expect("a new name");
    let issue = Issue { communicator, op: "barrier", dtype: "", count: 0, stream: 0 };
    schedules.issue(rank, issue).expect("a member");
    for _ in 1..1 << 22 {
        schedules.wait(rank, 0).expect("as many as may be");
    }
    let error = schedules.issue(rank, issue).expect_err("too many");
    assert_eq!(error.to_string(), "schedules: more than 4194304 actions");
}

/// A call that was refused has changed nothing.
#[test]
fn a_refused_call_has_no_effect() {
    let mut schedules = Schedules::new(2, None).expect("few ranks");
    let [zero, one] = [0, 1].map(Rank::new);
    let mut other = Schedules::new(2, None).expect("few ranks");
    other.communicator("x", &[zero]).expect("a new name");
    let world = schedules.communicator("world", &[zero, one]).expect("a new name");
    let issue = Issue { communicator: world, op: "barrier", dtype: "", count: 0, stream: 0 };
    schedules.issue(zero, Issue { op: "a\tb", ..issue }).expect_err("a bad name");
    schedules.wait(zero, 0).expect_err("there is no action");
    let error = schedules.issue(Rank::new(2), issue).expect_err("no such rank");
    assert_eq!(
        error,
        Error::Schedules { place: "schedules".to_owned(), problem: "rank 2 of 2 ranks".to_owned() }
    );
    schedules.communicator("twice", &[zero, one, zero]).expect_err("twice");
    let again = schedules.communicator("again", &[zero, one]).expect("a new name");
    for rank in [zero, one] {
        schedules.issue(rank, issue).expect("a member");
        schedules.issue(rank, Issue { communicator: again, ..issue }).expect("a member");
    }
    assert_eq!(hsdp_simulator::judge(&schedules), hsdp_simulator::ScheduleVerdict::Ok);
    let written = r#"{"communicators":{"world":[0,1],"again":[0,1]},"kernels":0,"schedules":[[{"comm":"world","op":"barrier","dtype":"","count":0,"stream":0},"#;
    assert!(schedules.to_json().starts_with(written), "{}", schedules.to_json());
}
