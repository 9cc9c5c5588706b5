//! A switch for the recording of spans.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::Metadata;
use tracing::callsite::rebuild_interest_cache;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

/// A switch that any thread may turn on or off. It affects spans that begin later.
#[derive(Clone, Debug, Default)]
pub struct Switch(Arc<AtomicBool>);

impl Switch {
    /// Starts to record new spans.
    pub fn turn_on(&self) {
        self.0.store(true, Ordering::Relaxed);
        rebuild_interest_cache();
    }

    /// Stops recording new spans.
    pub fn turn_off(&self) {
        self.0.store(false, Ordering::Relaxed);
        // Otherwise each later span would still ask the filter.
        rebuild_interest_cache();
    }

    fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<S> Filter<S> for Switch {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        self.is_on()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(if self.is_on() { LevelFilter::TRACE } else { LevelFilter::OFF })
    }
}
