//! The warning that comes before a deadline.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hsdp_comm::{WorldOptions, launch};
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::sum;

/// What was warned of, in the threads that it is the default of.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            fields.push_str(&format!("{field}={value:?} "));
        });
        self.0.lock().expect("not poisoned").push(fields);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_late_rank_is_named_in_a_warning_and_nothing_ends() {
    let options = WorldOptions { late: Duration::from_millis(50), ..WorldOptions::default() };
    let warnings = Warnings::default();
    let sums = launch(2, options, |world| {
        // Rank 1 comes when rank 0 has warned.
        while world.rank().index() == 1 && warnings.0.lock().expect("not poisoned").is_empty() {
            std::thread::yield_now();
        }
        tracing::subscriber::with_default(warnings.clone(), || sum(&world, vec![1.0]))
    });
    assert_eq!(sums, [Ok(Ok(vec![2.0])), Ok(Ok(vec![2.0]))]);
    let warnings = warnings.0.lock().expect("not poisoned");
    assert_eq!(warnings.len(), 1, "once: {warnings:?}");
    for expected in ["rank=0", "all_reduce sum f32 1 element", "missing=[1]", "waited=50ms"] {
        assert!(warnings[0].contains(expected), "`{expected}` is missing in {}", warnings[0]);
    }
}
