//! The choice of warnings that are shown: a warning that comes a thousand times does not hide the others.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Different texts of one kind that are shown at once.
const AT_ONCE: u64 = 10;

/// The time after which a kind is shown again.
const AGAIN: Duration = Duration::from_secs(60);

/// The kinds of warnings so far, by their identifiers.
#[derive(Debug)]
pub(super) struct Repeats<K>(HashMap<K, Kind>);

#[derive(Debug)]
struct Kind {
    text: String,
    shown: u64,
    at: Instant,
    /// Since the last one that was shown.
    left_out: u64,
}

/// A warning that is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// At once. Since the last one of its kind, equal ones may have come, as from several ranks.
    AtOnce,
    /// For the first time in a minute, after so many of its kind that were left out.
    Again(u64),
}

impl<K: Eq + Hash> Repeats<K> {
    /// Whether a warning is shown.
    pub(super) fn admit(&mut self, kind: K, text: &str, now: Instant) -> Option<Shown> {
        let kind = self.0.entry(kind).or_insert_with(|| Kind::new(now));
        let shown = if kind.shown < AT_ONCE && kind.text != text {
            Shown::AtOnce
        } else if now.duration_since(kind.at) >= AGAIN {
            Shown::Again(kind.left_out)
        } else {
            kind.left_out += 1;
            return None;
        };
        *kind = Kind { text: text.to_owned(), shown: kind.shown + 1, at: now, left_out: 0 };
        Some(shown)
    }
}

impl<K> Default for Repeats<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl Kind {
    fn new(at: Instant) -> Self {
        Self { text: String::new(), shown: 0, at, left_out: 0 }
    }
}
