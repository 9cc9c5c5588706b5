//! A trace of the ranks' work over time, for <https://ui.perfetto.dev>, with one lane for each
//! thread.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::Metadata;
use tracing::callsite::rebuild_interest_cache;
use tracing_chrome::{ChromeLayer, ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter, SubscriberExt as _};
use tracing_subscriber::{Layer as _, Registry, reload};

use crate::failure::Failure;
use crate::file::create_log;
use crate::warnings::Warnings;

/// Number of recorded steps: enough to see the pattern, and few enough that the file opens at once.
pub(crate) const TRACED_STEPS: usize = 10;

/// Extension of the file until the first step completes. A run without a completed step leaves the
/// trace of an earlier run in place.
const NEW: &str = "json.new";

/// Receives the events and spans of all threads. The trace itself begins later, when the process of
/// rank 0 is known.
pub(crate) struct TraceRecorder {
    switch: Switch,
    layer: reload::Handle<Option<ChromeLayer<Registry>>, Registry>,
}

/// A recording. Dropping it completes the file.
pub(crate) struct Trace {
    switch: Switch,
    file: PathBuf,
    _writer: FlushGuard,
}

impl fmt::Debug for TraceRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceRecorder").finish_non_exhaustive()
    }
}

impl TraceRecorder {
    /// Installs the subscriber of the process. It shows warnings from then on.
    pub(crate) fn listen(warnings: &Warnings) -> Result<Self, Failure> {
        let switch = Switch::default();
        let (layer, handle) = reload::Layer::new(None);
        let traced = Registry::default().with(layer.with_filter(switch.clone()));
        let subscriber = traced.with(warnings.layer());
        tracing::subscriber::set_global_default(subscriber).map_err(Failure::work)?;
        Ok(Self { switch, layer: handle })
    }

    /// Records all spans of all threads into a temporary file, until the switch is turned off.
    /// [`keep`] renames it to `file`.
    pub(crate) fn start(&self, file: &Path) -> Result<Trace, Failure> {
        let new = file.with_extension(NEW);
        let opened =
            create_log(&new).map_err(|error| Failure::Input(format!("cannot write {error}")))?;
        let writer = Unfailing { file: opened, failed: false };
        let (layer, guard) = ChromeLayerBuilder::new().writer(writer).include_args(true).build();
        self.switch.turn_on();
        self.layer.reload(layer).map_err(Failure::work)?;
        Ok(Trace { switch: self.switch.clone(), file: file.to_owned(), _writer: guard })
    }
}

impl Trace {
    pub(crate) fn switch(&self) -> Switch {
        self.switch.clone()
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // The file is absent after `keep` has renamed it.
        let _ = fs::remove_file(self.file.with_extension(NEW));
    }
}

/// Renames a started trace to its final name, in place of an earlier one.
pub(crate) fn keep(file: &Path) -> Result<(), Failure> {
    fs::rename(file.with_extension(NEW), file)
        .map_err(|error| Failure::Work(format!("cannot write {}: {error}", file.display())))
}

/// The file of a trace. The thread of `tracing-chrome` panics on a write error, so an error ends
/// only the trace.
struct Unfailing {
    file: File,
    failed: bool,
}

impl Write for Unfailing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.failed
            && let Err(error) = self.file.write_all(bytes)
        {
            self.failed = true;
            hsdp_warnings::warn!(
                %error, "the trace ends early, because its file cannot be written"
            );
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

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

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::keep;

    #[test]
    fn a_trace_that_is_gone_is_named() {
        let folder = TempDir::new().expect("a folder");
        let lost = keep(&folder.path().join("trace.json")).expect_err("there is none");
        assert!(lost.to_string().contains("trace.json: No such file"), "{lost}");
    }
}
