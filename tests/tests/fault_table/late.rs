//! Row 5: a rank that is late is named, and is not dead.

use std::time::{Duration, Instant};

use hsdp::WorldOptions;
use hsdp_comm::{FaultKind, Stage};
use hsdp_tests::support::models::unit;

use crate::runner::Happened;
use crate::training::{FAULTY, SURVIVORS, Training};

const DELAY: Duration = Duration::from_millis(300);
const LATE: Duration = Duration::from_millis(50);

pub(crate) fn slow() -> Happened {
    let delayed = Training::with_fault((unit(1), Stage::Reduce), FaultKind::Delay(DELAY));
    let world = WorldOptions { late: LATE, ..delayed.world.clone() };
    let started = Instant::now();
    let training = Training { world, ..delayed };
    training.run().assert_no_trace();
    let took = started.elapsed();
    let warnings = training.said.warnings();
    // Some wait for the late rank itself, others for a rank that waits for it: all name it as the
    // culprit.
    for rank in SURVIVORS {
        let rank = format!(" rank={rank} step={FAULTY} ");
        let named =
            |(said, _): &&(String, Instant)| said.contains(&rank) && said.contains(" culprit=2 ");
        let (said, _) = warnings.iter().find(named).unwrap_or_else(|| panic!("{warnings:?}"));
        let lateness = lateness(said);
        assert!(LATE <= lateness && lateness <= took, "{said}, and all took {took:?}");
    }
    let names = |(said, _): &&(String, Instant)| {
        said.contains("step=2") && said.contains("missing=[2] culprit=2 lateness=")
    };
    let (said, at) = warnings.iter().find(names).unwrap_or_else(|| panic!("{warnings:?}"));
    Happened::in_time(said, at.duration_since(started))
}

/// The number in `lateness=50.1ms`, or `lateness=1.2s`.
fn lateness(said: &str) -> Duration {
    let (_, rest) = said.split_once("lateness=").expect("a lateness");
    let number = rest.split_whitespace().next().expect("a number");
    let (number, unit) = match number.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (number.strip_suffix('s').expect("seconds"), 1.0),
    };
    Duration::from_secs_f64(number.parse::<f64>().expect("a number") * unit)
}
