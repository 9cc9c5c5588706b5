use std::collections::HashMap;

use super::*;

const WHOLE: [(&str, &str); 5] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29500"),
];

/// Reads a complete environment with these changes: a value, or none.
fn read(changes: &[(&'static str, Option<&str>)]) -> Result<Bootstrap, String> {
    let mut variables: HashMap<&str, String> =
        WHOLE.map(|(name, value)| (name, value.to_owned())).into();
    for (name, value) in changes {
        match value {
            Some(value) => drop(variables.insert(name, (*value).to_owned())),
            None => drop(variables.remove(name)),
        }
    }
    let secret = |_| Ok(Secret::from_bytes([0; 32]));
    let read = Bootstrap::read(&|name| Ok(variables.get(name).cloned()), secret);
    read.map_err(|error| error.to_string())
}

#[test]
fn what_launchers_set_is_read() {
    let said = read(&[]).expect("whole");
    assert_eq!((said.rank.get(), said.local_rank, said.options.terms.world), (3, 1, 4));
    assert_eq!(said.options.address.to_string(), "127.0.0.1:29500");
    assert_eq!((said.options.job.name.as_str(), said.options.job.start), ("hsdp", 0));
}

#[test]
fn what_torchrun_sets_is_read() {
    let torchrun = [
        ("TORCHELASTIC_USE_AGENT_STORE", Some("True")),
        ("TORCHELASTIC_RUN_ID", Some("night")),
        ("TORCHELASTIC_RESTART_COUNT", Some("2")),
    ];
    let said = read(&torchrun).expect("whole");
    assert_eq!(said.options.address.port(), 29501, "the agent has the other one");
    assert_eq!((said.options.job.name.as_str(), said.options.job.start), ("night", 2));
    let own = [("HSDP_CONTROL_PORT", Some("4000")), ("HSDP_JOB_ID", Some("own"))];
    let said = read(&[&torchrun[..], &own[..]].concat()).expect("whole");
    assert_eq!((said.options.address.port(), said.options.job.name.as_str()), (4000, "own"));
}

#[test]
fn what_is_wrong_is_named_with_its_value() {
    let cases: [(&'static str, Option<&str>, &str); 11] = [
        ("RANK", Some("4"), "RANK=4: ranks of a world of 4 are numbered from 0 to 3"),
        ("RANK", Some("first"), "RANK=first: not a number: invalid digit found in string"),
        ("RANK", Some("-1"), "RANK=-1: not a number: invalid digit found in string"),
        ("RANK", Some("0"), "LOCAL_RANK=1: it must not exceed RANK=0, which counts over all hosts"),
        ("LOCAL_RANK", Some("9"), "LOCAL_RANK=9: ranks of a world of 4 are numbered from 0 to 3"),
        ("WORLD_SIZE", Some("0"), "WORLD_SIZE=0: a world of 0 ranks: there must be 1 to 4096"),
        (
            "WORLD_SIZE",
            Some("many"),
            "WORLD_SIZE=many: not a number: invalid digit found in string",
        ),
        (
            "MASTER_PORT",
            Some("70000"),
            "MASTER_PORT=70000: not a number: number too large to fit in target type",
        ),
        (
            "HSDP_JOB_START",
            Some("x"),
            "HSDP_JOB_START=x: not a number: invalid digit found in string",
        ),
        (
            "MASTER_ADDR",
            None,
            "MASTER_ADDR: not set, while RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT are",
        ),
        (
            "WORLD_SIZE",
            None,
            "WORLD_SIZE: not set, while RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are",
        ),
    ];
    for (name, value, said) in cases {
        assert_eq!(read(&[(name, value)]).expect_err("refused"), said);
    }
    let nothing = WHOLE.map(|(name, _)| (name, None));
    assert_eq!(
        read(&nothing).expect_err("refused"),
        "RANK: not set, nor are WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: processes are started by a launcher"
    );
}

#[test]
fn an_address_must_be_one_that_others_can_reach() {
    let refused = resolve("0.0.0.0", 1).expect_err("not an address").to_string();
    assert_eq!(
        refused,
        "MASTER_ADDR=0.0.0.0: it stands for all addresses, and no process can connect to it"
    );
    assert_eq!(resolve("::1", 7).expect("an address").to_string(), "[::1]:7");
}
