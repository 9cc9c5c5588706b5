//! Chooses the warnings to show, so that a warning that repeats a thousand times does not hide the
//! others.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Number of different texts of one kind that are shown without a pause.
const AT_ONCE: u64 = 10;

/// Time after which a kind is shown again.
const AGAIN: Duration = Duration::from_secs(60);

/// The kinds of warnings so far, by their identifiers.
#[derive(Debug)]
pub(super) struct Repeats<K>(HashMap<K, Kind>);

#[derive(Debug)]
struct Kind {
    text: String,
    shown: u64,
    at: Instant,
    /// Number of warnings left out since the last one that was shown.
    left_out: u64,
}

impl<K: Eq + Hash> Repeats<K> {
    /// Returns how many warnings of this kind were left out since the last one that was shown.
    /// `None` if this one is left out, too.
    pub(super) fn admit(&mut self, kind: K, text: &str, now: Instant) -> Option<u64> {
        let kind = self.0.entry(kind).or_insert_with(|| Kind::new(now));
        let is_new = kind.shown < AT_ONCE && kind.text != text;
        if !is_new && now.duration_since(kind.at) < AGAIN {
            kind.left_out += 1;
            return None;
        }
        let left_out = kind.left_out;
        *kind = Kind { text: text.to_owned(), shown: kind.shown + 1, at: now, left_out: 0 };
        Some(left_out)
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
