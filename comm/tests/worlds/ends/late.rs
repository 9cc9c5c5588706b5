//! The warnings that come before a deadline, and the good news after them.

use std::time::{Duration, Instant};

use hsdp_comm::{Channel, Group, Reduction, WorldOptions};
use hsdp_sharding::Rank;
use tracing::Level;

use super::{sum, tag};
use crate::common::{Said, outcomes};

/// Returns how often something was said at `level`.
fn count(said: &Said, level: Level) -> usize {
    said.lines().iter().filter(|(it, _)| *it == level).count()
}

#[test]
fn a_late_rank_is_named_each_time_that_the_period_has_passed_and_when_it_comes() {
    let late = Duration::from_millis(50);
    let options = WorldOptions { late, ..WorldOptions::default() };
    let said = Said::of("lateness");
    let sums = outcomes(2, options, |world| {
        world.set_step(7);
        // Rank 1 comes when rank 0 has warned three times.
        while world.rank().index() == 1 && count(&said, Level::WARN) < 3 {
            std::thread::yield_now();
        }
        tracing::subscriber::with_default(said.clone(), || sum(&world, vec![1.0]))
    });
    assert_eq!(sums, [Ok(Ok(vec![2.0])), Ok(Ok(vec![2.0]))], "late is not dead");
    let said = said.lines();
    let (news, warnings) = said.split_last().expect("there were warnings");
    assert!(warnings.len() >= 3, "{warnings:?}");
    for (periods, (level, warning)) in (1..).zip(warnings) {
        assert_eq!(*level, Level::WARN);
        assert_names(warning, &["rank=0 step=7", "all_reduce sum f32 1 element", "missing=[1]"]);
        assert!(lateness(warning) >= late * periods, "{warnings:?}");
    }
    assert_eq!(news.0, Level::INFO, "{said:?}");
    assert_names(&news.1, &["rank=0 step=7", "all_reduce sum f32 1 element", "late=[1]"]);
    assert!(lateness(&news.1) >= late * 3, "{said:?}");
}

/// A rank that is never named comes after this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Rank 0 waits for rank 1, which waits for rank 2: the warnings of both name rank 2.
#[test]
fn a_late_warning_names_the_rank_that_all_others_wait_for() {
    let options = WorldOptions { late: Duration::from_millis(50), ..WorldOptions::default() };
    let said = Said::of("lateness");
    let warned = |rank: usize| {
        let said = said.lines();
        let of_rank = |it: &&(Level, String)| it.1.contains(&format!("rank={rank} "));
        said.iter().filter(of_rank).map(|(_, said)| said.clone()).collect::<Vec<_>>()
    };
    let names = |rank: usize, missing: usize| {
        let culprit = format!("missing=[{missing}] culprit=2 lateness=");
        warned(rank).iter().any(|said| said.contains(&culprit))
    };
    let sums = outcomes(3, options, |world| {
        let pair = |ranks: [usize; 2]| world.group(&ranks.map(Rank::new), Channel::User);
        let sum = |group: Group| group.all_reduce(tag(), Reduction::Sum, vec![1.0])?.wait();
        // Rank 2 comes when both others have named it. In their first warnings they may not know yet that rank 1 has come.
        let begun = Instant::now();
        let names_it = || names(0, 1) && names(1, 2);
        while world.rank().index() == 2 && !names_it() && begun.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        tracing::subscriber::with_default(said.clone(), || match world.rank().index() {
            0 => sum(pair([0, 1])?),
            1 => sum(pair([1, 2])?).and_then(|_| sum(pair([0, 1])?)),
            _ => sum(pair([1, 2])?),
        })
    });
    assert_eq!(sums, [(); 3].map(|()| Ok(Ok(vec![2.0]))));
    for (rank, missing) in [(0, 1), (1, 2)] {
        assert!(names(rank, missing), "{:?}", warned(rank));
    }
}

fn assert_names(said: &str, expected: &[&str]) {
    for expected in expected {
        assert!(said.contains(expected), "`{expected}` is missing in {said}");
    }
}

/// The number in `lateness=50.1ms`, or `lateness=1.2s`.
fn lateness(said: &str) -> Duration {
    let (_, rest) = said.split_once("lateness=").expect("a lateness");
    let number = rest.split_whitespace().next().expect("a number");
    let (number, unit) = match number.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (number.trim_end_matches('s'), 1.0),
    };
    Duration::from_secs_f64(number.parse::<f64>().expect("a number") * unit)
}
