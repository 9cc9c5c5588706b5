//! Row 5: a rank that is late is named, and is not dead.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hsdp::WorldOptions;
use hsdp_comm::{FaultKind, Stage};
use hsdp_tests::support::models::unit;
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::runner::Happened;
use crate::training::Training;

/// What was said as a warning, and when.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said(Arc<Mutex<Vec<(String, Instant)>>>);

impl Said {
    fn warnings(&self) -> Vec<(String, Instant)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Subscriber for Said {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Vec::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            fields.push(format!("{field}={value:?}"));
        });
        let said = (fields.join(" "), Instant::now());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(said);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

const DELAY: Duration = Duration::from_millis(300);
const LATE: Duration = Duration::from_millis(50);

pub(crate) fn slow() -> Happened {
    let delayed = Training::with_fault((unit(1), Stage::Reduce), FaultKind::Delay(DELAY));
    let world = WorldOptions { late: LATE, ..delayed.world.clone() };
    let started = Instant::now();
    let training = Training { world, ..delayed };
    training.run().assert_no_trace();
    let warnings = training.said.warnings();
    // Whoever waits for a rank that waits for the late one names the former; who waits for the late one itself names it.
    let names = |(said, _): &&(String, Instant)| {
        said.contains("missing=[2]") && said.contains("step=2") && said.contains("lateness=")
    };
    let (said, at) = warnings.iter().find(names).unwrap_or_else(|| panic!("{warnings:?}"));
    Happened::in_time(said, at.duration_since(started))
}
