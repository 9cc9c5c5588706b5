//! The options with which this rank has updated its shards. The ranks compare them, since the replicas of a shard stay equal
//! only under equal updates. PROTOCOL.md, "Updates".

use std::fmt::Write as _;
use std::mem;

use crate::options::digest;

/// The digest of no update.
const NONE: u64 = 0;

/// Bytes of lines for which there is room from the first update on: a later one with longer numbers allocates nothing.
const ROOM: usize = 512;

/// How the last step that has an update was updated.
#[derive(Debug, Default)]
pub(crate) struct Updated {
    /// The number of steps that were finished then, that one included.
    finished: u64,
    lines: String,
    digest: u64,
}

impl Updated {
    /// Returns the memory of the lines of an update, which [`note`](Self::note) takes again.
    pub(crate) fn room(&mut self) -> String {
        let mut lines = mem::take(&mut self.lines);
        lines.clear();
        lines.reserve(ROOM);
        lines
    }

    /// Notes the options of an update, one line each, the norm to which the gradients were clipped,
    /// and lines of how they were clipped besides. The update is that of the last of the `finished`
    /// steps.
    pub(crate) fn note(
        &mut self,
        finished: u64,
        options: String,
        max_norm: Option<f64>,
        clipped: &str,
    ) {
        self.lines = options;
        if !matches!(self.lines.as_bytes(), [] | [.., b'\n']) {
            self.lines.push('\n');
        }
        let written = match max_norm {
            Some(norm) => writeln!(self.lines, "gradients clipped to {norm:?}"),
            None if clipped.is_empty() => writeln!(self.lines, "gradients that are not clipped"),
            None => Ok(()),
        };
        written.expect("a string takes any text");
        self.lines.push_str(clipped);
        self.digest = digest::of_text(&self.lines).max(NONE + 1);
        self.finished = finished;
    }

    /// A digest of the update of the last of the `finished` steps, which ranks compare. All steps without an update have the same.
    pub(crate) fn digest(&self, finished: u64) -> u64 {
        if self.finished == finished { self.digest } else { NONE }
    }

    /// The lines of that update.
    pub(crate) fn lines(&self, finished: u64) -> Vec<String> {
        let lines = if self.finished == finished { &*self.lines } else { "no update" };
        lines.lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(finished: u64, options: &str) -> Updated {
        let mut updated = Updated::default();
        updated.note(3, "of an older step\n".to_owned(), Some(0.5), "");
        updated.note(finished, options.to_owned(), None, "");
        updated
    }

    #[test]
    fn the_digest_is_that_of_the_last_update_and_of_no_other_step() {
        let [one, other] = ["adamw eps 1e-8\n", "adamw eps 1e-9\n"].map(|it| noted(7, it));
        assert_eq!(one.digest(7), noted(7, "adamw eps 1e-8\n").digest(7));
        assert_ne!(one.digest(7), other.digest(7));
        assert_eq!([one.digest(8), Updated::default().digest(0)], [NONE; 2]);
    }

    #[test]
    fn the_lines_are_those_of_the_options_and_of_the_clipping() {
        let lines = ["adamw eps 1e-8", "gradients that are not clipped"];
        assert_eq!(noted(7, "adamw eps 1e-8\n").lines(7), lines);
        assert_eq!(noted(7, "adamw eps 1e-8").lines(7), lines);
        assert_eq!(noted(7, "").lines(7), lines[1..]);
        assert_eq!(noted(7, "").lines(9), ["no update"]);
    }
}
