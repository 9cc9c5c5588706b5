//! Collects the warnings of a test.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The warnings of the threads that have it as their `tracing` subscriber, each with its time.
#[derive(Clone, Debug)]
pub struct Said(Arc<Mutex<Vec<(String, Instant)>>>);

impl Default for Said {
    /// Begins to listen, with no warning so far.
    fn default() -> Self {
        // `tracing` decides for each place in the code whether any subscriber hears it. If a thread
        // reaches the place first while another makes its subscriber, the decision can miss that
        // one. A subscriber of the whole process is always there.
        let _ = tracing::subscriber::set_global_default(Self(Arc::default()));
        Self(Arc::default())
    }
}

impl Said {
    /// The warnings so far, each as `field=value` separated by spaces, in order.
    #[must_use]
    pub fn warnings(&self) -> Vec<(String, Instant)> {
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
