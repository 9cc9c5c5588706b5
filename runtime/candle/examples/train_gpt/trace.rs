//! A trace of the ranks' work over time, for <https://ui.perfetto.dev>, with one lane for each thread.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::{Layer as _, Registry};

use super::failure::Failure;

/// The number of steps that are recorded: enough to see the pattern, and few enough for a file that opens at once.
pub(crate) const TRACED_STEPS: usize = 10;

/// A recording. Dropping it completes the file.
pub(crate) struct Trace {
    switch: Switch,
    _file: FlushGuard,
}

/// Ends a recording, from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Switch(Arc<AtomicBool>);

impl Trace {
    /// Records all spans of all threads into `file`, until the switch is turned off.
    pub(crate) fn start(file: &Path) -> Result<Self, Failure> {
        let switch = Switch(Arc::new(AtomicBool::new(true)));
        let (layer, guard) = ChromeLayerBuilder::new().file(file).include_args(true).build();
        let on = Arc::clone(&switch.0);
        let filter = dynamic_filter_fn(move |_, _| on.load(Ordering::Relaxed));
        let subscriber = Registry::default().with(layer.with_filter(filter));
        tracing::subscriber::set_global_default(subscriber).map_err(Failure::training)?;
        Ok(Self { switch, _file: guard })
    }

    pub(crate) fn switch(&self) -> Switch {
        self.switch.clone()
    }
}

impl Switch {
    /// Records no span that begins from now on.
    pub(crate) fn turn_off(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
