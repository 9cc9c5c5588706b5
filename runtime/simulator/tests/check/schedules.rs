//! Schedules whose verdicts are known: a line of `schedules.jsonl` each, with the verdict and, for a deadlock, the ranks.

use hsdp_sharding::Rank;
use hsdp_simulator::{ScheduleVerdict, Schedules, judge};
use serde::Deserialize;

#[derive(Deserialize)]
struct File {
    expected: Expected,
}

#[derive(Debug, Deserialize)]
struct Expected {
    verdict: String,
    ranks: Vec<Rank>,
}

#[test]
fn known_schedules_get_their_verdicts() {
    let mut kinds = [0; 3];
    for (number, text) in (1..).zip(include_str!("../schedules.jsonl").lines()) {
        let File { expected } = serde_json::from_str(text).expect("JSON");
        let schedules = Schedules::from_json(text).expect("schedules");
        let verdict = judge(&schedules);
        let (kind, name, ranks) = match &verdict {
            ScheduleVerdict::Ok => (0, "ok", Vec::new()),
            // The ranks of a mismatch are the members of the operation, which are not unique if there are several.
            ScheduleVerdict::Mismatch(_) => (1, "mismatch", expected.ranks.clone()),
            ScheduleVerdict::Deadlock(deadlock) => (2, "deadlock", deadlock.ranks.clone()),
        };
        assert_eq!((name, ranks), (&*expected.verdict, expected.ranks), "line {number}: {verdict}");
        kinds[kind] += 1;

        let written = schedules.to_json();
        let read = Schedules::from_json(&written).expect("what was written");
        assert_eq!((judge(&read), read.to_json()), (verdict, written), "line {number}");
    }
    assert_eq!(kinds, [11, 2, 3]);
}
