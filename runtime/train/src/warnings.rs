//! The warnings of the libraries, as a program shows them.
//!
//! In reading order: `repeats` chooses the warnings to show, `line` formats one for the file,
//! `kept` writes the file.

mod kept;
mod line;
mod repeats;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use hsdp_warnings::Warning;
use indicatif::{ProgressBar, WeakProgressBar};
use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::subscriber::SetGlobalDefaultError;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use self::kept::Kept;
use self::repeats::Repeats;
use crate::file::FileError;
use crate::stderr::tell;

/// The warnings of a process: its `tracing` events of the levels WARN and ERROR.
///
/// Each warning is printed to stderr at once, and appended to the file of
/// [`keep_in`](Self::keep_in). Repeats are left out: a text that equals the one before it, and the
/// eleventh and later texts of one kind. After a minute the next one is shown again, with the
/// number of texts of its kind that were left out before it. A kind is a place in the source. All
/// warnings are counted.
///
/// ```
/// use hsdp_train::Warnings;
///
/// let warnings = Warnings::of("train");
/// warnings.listen()?; // or `layer`, beside other layers
/// tracing::warn!(free = 12, "the disk is nearly full");
/// // On stderr: `train: warning: the disk is nearly full (free: 12)`
/// assert_eq!(warnings.count(), 1);
/// # Ok::<(), tracing::subscriber::SetGlobalDefaultError>(())
/// ```
#[derive(Clone)]
pub struct Warnings(Arc<Mutex<State>>);

struct State {
    program: String,
    /// Rank of this process, if other ranks run in other processes.
    rank: Option<usize>,
    bar: WeakProgressBar,
    /// Kinds of warnings so far. Their number is bounded by the number of places in the source.
    repeats: Repeats<Identifier>,
    kept: Kept,
    count: u64,
}

impl Warnings {
    /// Creates the warnings of a program with this name.
    #[must_use]
    pub fn of(program: &str) -> Self {
        Self(Arc::new(Mutex::new(State {
            program: program.to_owned(),
            rank: None,
            bar: WeakProgressBar::new(),
            repeats: Repeats::default(),
            kept: Kept::default(),
            count: 0,
        })))
    }

    /// Starts to receive the events of all threads. A program with further layers adds
    /// [`layer`](Self::layer) to them instead.
    ///
    /// # Errors
    /// If the process has a subscriber already.
    pub fn listen(&self) -> Result<(), SetGlobalDefaultError> {
        tracing::subscriber::set_global_default(Registry::default().with(self.layer()))
    }

    /// Returns the layer that receives the events, for a subscriber with several layers.
    pub fn layer<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span>,
    {
        Receiver(self.clone()).with_filter(LevelFilter::WARN)
    }

    /// Prefixes later lines with the rank of this process. It is for ranks that are processes.
    pub fn set_rank(&self, rank: usize) {
        self.0.lock().rank = Some(rank);
    }

    /// Prints later warnings above a progress bar, as long as the bar exists.
    pub fn show_beside(&self, bar: &ProgressBar) {
        self.0.lock().bar = bar.downgrade();
    }

    /// Appends each shown warning to a file as a line of JSON, in addition to stderr. Warnings from
    /// before this call are included. The file is created with the first warning. If it cannot be
    /// written, one line on stderr reports it.
    pub fn keep_in(&self, file: &Path) {
        let mut state = self.0.lock();
        let kept = state.kept.begin(file);
        state.tell_if_lost(kept);
    }

    /// Returns the number of warnings so far, including those left out.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.lock().count
    }
}

impl State {
    fn add(&mut self, (event, warning): (&Event<'_>, &Warning), now: Instant) {
        self.count += 1;
        let (kind, text) = (event.metadata().callsite(), warning.text());
        let Some(left_out) = self.repeats.admit(kind, &text, now) else { return };
        match left_out {
            0 => self.show(&text),
            more => self.show(&format!("{text} [{more} more like it were left out before]")),
        }
        let kept = self.kept.add(line::line(warning, self.rank, left_out));
        self.tell_if_lost(kept);
    }

    fn tell_if_lost(&self, kept: Result<(), FileError>) {
        if let Err(error) = kept {
            self.show(&format!("warning: warnings cannot be kept in {error}"));
        }
    }

    fn show(&self, text: &str) {
        let rank = self.rank.map_or_else(String::new, |rank| format!("rank {rank}: "));
        let tell = || tell(&self.program, format_args!("{rank}{text}"));
        match self.bar.upgrade().filter(|bar| !bar.is_finished()) {
            Some(bar) => bar.suspend(tell),
            None => tell(),
        }
    }
}

struct Receiver(Warnings);

impl<S: Subscriber> Layer<S> for Receiver {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        // The text is made before the lock is taken, because it calls code of the event's values.
        let warning = Warning::of(event);
        self.0.0.lock().add((event, &warning), Instant::now());
    }
}

impl fmt::Debug for Warnings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Warnings").field("count", &self.count()).finish_non_exhaustive()
    }
}
