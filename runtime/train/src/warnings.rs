//! The warnings of the libraries, as a program shows them.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hsdp_warnings::Warning;
use indicatif::{ProgressBar, WeakProgressBar};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Map, Value};
use tracing::callsite::Identifier;
use tracing::subscriber::SetGlobalDefaultError;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

use crate::file::{self, FileError};
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
pub struct Warnings(Arc<Mutex<WarningsState>>);

struct WarningsState {
    program: String,
    /// Rank of this process, if other ranks run in other processes.
    rank: Option<usize>,
    bar: WeakProgressBar,
    /// Kinds of warnings so far. Their number is bounded by the number of places in the source.
    repeats: Repeats<Identifier>,
    kept: KeptWarnings,
    count: u64,
}

impl Warnings {
    /// Creates the warnings of a program with this name.
    #[must_use]
    pub fn of(program: &str) -> Self {
        Self(Arc::new(Mutex::new(WarningsState {
            program: program.to_owned(),
            rank: None,
            bar: WeakProgressBar::new(),
            repeats: Repeats::default(),
            kept: KeptWarnings::default(),
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

impl WarningsState {
    fn add(&mut self, event: &Event<'_>, warning: &Warning, now: Instant) {
        self.count += 1;
        let kind = event.metadata().callsite();
        let text = warning.text();
        let Some(left_out) = self.repeats.admit(kind, &text, now) else { return };
        match left_out {
            0 => self.show(&text),
            more => self.show(&format!("{text} [{more} more like it were left out before]")),
        }
        let kept = self.kept.add(line_of(warning, self.rank, left_out));
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
        self.0.0.lock().add(event, &warning, Instant::now());
    }
}

impl fmt::Debug for Warnings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Warnings").field("count", &self.count()).finish_non_exhaustive()
    }
}

/// Maximum number of lines that wait for a file.
const MOST_EARLY: usize = 100;

/// Destination of the lines.
#[derive(Debug)]
enum KeptWarnings {
    /// Lines that wait until a file is named.
    Early(Vec<String>),
    /// File to which lines are appended.
    In(PathBuf),
    /// The file could not be written. Lines are dropped.
    Lost,
}

impl Default for KeptWarnings {
    fn default() -> Self {
        Self::Early(Vec::new())
    }
}

impl KeptWarnings {
    /// Writes the waiting lines into `file`, and later lines too.
    ///
    /// # Errors
    /// If the file cannot be written. Later lines are then dropped.
    fn begin(&mut self, file: &Path) -> Result<(), FileError> {
        let before = std::mem::replace(self, Self::In(file.to_owned()));
        let Self::Early(lines) = before else { return Ok(()) };
        lines.into_iter().try_for_each(|line| self.add(line))
    }

    /// Adds a line.
    ///
    /// # Errors
    /// Once, if the file cannot be written. Later lines are then dropped.
    fn add(&mut self, line: String) -> Result<(), FileError> {
        match self {
            Self::Early(lines) if lines.len() < MOST_EARLY => lines.push(line),
            Self::Early(_) | Self::Lost => {}
            Self::In(file) => {
                // Warnings are rare, so the file is opened for each of them. It exists only if
                // there was one.
                let added = file::append(file, format!("{line}\n").as_bytes());
                return added.inspect_err(|_| *self = Self::Lost);
            }
        }
        Ok(())
    }
}

/// Returns the line of JSON for a warning of `rank`. `left_out` others of its kind were left out
/// before it.
fn line_of(warning: &Warning, rank: Option<usize>, left_out: u64) -> String {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let field = |(name, value): &(&str, String)| ((*name).to_owned(), value.as_str().into());
    let line = WarningLine {
        unix_seconds: since_1970.as_secs_f64(),
        level: warning.level.as_str(),
        target: warning.target,
        rank,
        message: &warning.message,
        fields: warning.fields.iter().map(field).collect(),
        left_out,
    };
    serde_json::to_string(&line).unwrap_or_default()
}

/// Content of a line.
#[derive(Debug, Serialize)]
struct WarningLine<'a> {
    unix_seconds: f64,
    level: &'a str,
    target: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<usize>,
    message: &'a str,
    fields: Map<String, Value>,
    left_out: u64,
}

/// Number of different texts of one kind that are shown without a pause.
const AT_ONCE: u64 = 10;

/// Time after which a kind is shown again.
const AGAIN: Duration = Duration::from_secs(60);

/// The kinds of warnings so far, by their identifiers.
#[derive(Debug)]
struct Repeats<K>(HashMap<K, WarningKind>);

#[derive(Debug)]
struct WarningKind {
    text: String,
    shown: u64,
    at: Instant,
    /// Number of warnings left out since the last one that was shown.
    left_out: u64,
}

impl<K: Eq + Hash> Repeats<K> {
    /// Returns how many warnings of this kind were left out since the last one that was shown.
    /// `None` if this one is left out, too.
    fn admit(&mut self, kind: K, text: &str, now: Instant) -> Option<u64> {
        let kind = self.0.entry(kind).or_insert_with(|| WarningKind::new(now));
        let is_new = kind.shown < AT_ONCE && kind.text != text;
        if !is_new && now.duration_since(kind.at) < AGAIN {
            kind.left_out += 1;
            return None;
        }
        let left_out = kind.left_out;
        *kind = WarningKind { text: text.to_owned(), shown: kind.shown + 1, at: now, left_out: 0 };
        Some(left_out)
    }
}

impl<K> Default for Repeats<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl WarningKind {
    fn new(at: Instant) -> Self {
        Self { text: String::new(), shown: 0, at, left_out: 0 }
    }
}
