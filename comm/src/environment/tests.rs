use super::*;

fn answer(rank: Option<&str>, size: Option<&str>) -> Result<(), String> {
    let owned = |value: Option<&str>| value.map(str::to_owned);
    check(owned(rank), owned(size)).map_err(|error| error.to_string())
}

#[test]
fn one_process_is_served() {
    for (rank, size) in [(None, None), (Some("0"), None), (None, Some("1")), (Some("0"), Some("1"))]
    {
        assert_eq!(answer(rank, size), Ok(()));
    }
}

#[test]
fn everything_else_is_refused_by_name() {
    let cases = [
        (Some("0"), Some("4"), "WORLD_SIZE=4: this build serves one process"),
        (None, Some("4"), "WORLD_SIZE=4: this build serves one process"),
        (Some("4"), Some("4"), "RANK=4: ranks of a world of 4 are numbered from 0 to 3"),
        (Some("1"), None, "RANK=1: ranks of a world of 1 are numbered from 0 to 0"),
        (None, Some("0"), "WORLD_SIZE=0: a world has at least 1 rank"),
        (Some("first"), Some("1"), "RANK=first: not a number of ranks: invalid digit"),
        (None, Some("-1"), "WORLD_SIZE=-1: not a number of ranks: invalid digit"),
        (None, Some(""), "WORLD_SIZE=: not a number of ranks: cannot parse"),
    ];
    for (rank, size, expected) in cases {
        let refused = answer(rank, size).expect_err("refused");
        assert!(refused.starts_with(expected), "{refused}");
    }
}
