//! Comparisons of results with the expected values.

use std::fmt;

/// The result of a case. Displayed as the end of its line.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Everything is within its bound.
    Passed(Worst),
    /// Something is not, or the run failed: the value or the error, with its place.
    Failed(String),
    /// It was not run: the reason.
    Skipped(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed(worst) => worst.fmt(f),
            Self::Failed(what) | Self::Skipped(what) => f.write_str(what),
        }
    }
}

/// How near a passed case came to its bound.
#[derive(Clone, Debug, PartialEq)]
pub enum Worst {
    /// So many elements are equal bit for bit, as the case asks.
    Exact(usize),
    /// The largest error, in parts of its bound.
    OfBound {
        /// Error divided by bound, from 0 to 1.
        ratio: f64,
        /// Where: a parameter's element, or a step's loss.
        place: String,
    },
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(elements) => write!(f, "exact ({elements} elements)"),
            Self::OfBound { ratio, place } => write!(f, "worst {ratio:.2} of bound ({place})"),
        }
    }
}

/// Comparisons of one case, of which the worst is kept.
#[derive(Debug, Default)]
pub(super) struct Tally {
    compared: usize,
    beyond: usize,
    worst: Option<Finding>,
}

#[derive(Debug)]
struct Finding {
    ratio: f64,
    place: String,
    got: f64,
    expected: f64,
}

impl Tally {
    /// Compares a number with its bound: it may be off by `bound`, that included.
    pub(super) fn within(
        &mut self,
        got: f64,
        expected: f64,
        bound: f64,
        place: impl FnOnce() -> String,
    ) {
        let error = (got - expected).abs();
        let ratio = match error {
            0.0 => 0.0,
            // Also where one of the numbers is NaN, or the bound is 0.
            _ if error.is_nan() || bound.is_nan() => f64::INFINITY,
            _ => error / bound,
        };
        self.note(Finding { ratio, place: String::new(), got, expected }, place);
    }

    /// Compares two numbers bit for bit.
    pub(super) fn exactly(&mut self, got: f32, expected: f32, place: impl FnOnce() -> String) {
        let same = got.to_bits() == expected.to_bits();
        let ratio = if same { 0.0 } else { f64::INFINITY };
        let got = f64::from(got);
        let expected = f64::from(expected);
        self.note(Finding { ratio, place: String::new(), got, expected }, place);
    }

    fn note(&mut self, finding: Finding, place: impl FnOnce() -> String) {
        self.compared += 1;
        self.beyond += usize::from(finding.ratio > 1.0);
        if self.worst.as_ref().is_none_or(|worst| finding.ratio > worst.ratio) {
            self.worst = Some(Finding { place: place(), ..finding });
        }
    }

    /// The verdict on a case with bounds.
    pub(super) fn verdict(self) -> Verdict {
        match self.worst {
            // A case in which everything is frozen.
            None => Verdict::Passed(Worst::Exact(0)),
            Some(worst) if worst.ratio > 1.0 => {
                Verdict::Failed(beyond(&worst, self.beyond, self.compared))
            }
            Some(Finding { ratio, place, .. }) => Verdict::Passed(Worst::OfBound { ratio, place }),
        }
    }

    /// The verdict on a case that must be exact.
    pub(super) fn exact_verdict(self) -> Verdict {
        let compared = self.compared;
        match self.verdict() {
            Verdict::Passed(_) => Verdict::Passed(Worst::Exact(compared)),
            verdict => verdict,
        }
    }
}

fn beyond(worst: &Finding, beyond: usize, compared: usize) -> String {
    let Finding { ratio, place, got, expected } = worst;
    let times =
        if ratio.is_finite() { format!(", {ratio:.2} times the bound") } else { String::new() };
    format!("{place}: got {got}, expected {expected}{times} ({beyond} of {compared} wrong)")
}

/// The first place where two ranks differ in a bit.
pub(super) fn first_difference(one: &[f32], other: &[f32]) -> Option<usize> {
    if one.len() != other.len() {
        return Some(one.len().min(other.len()));
    }
    one.iter().zip(other).position(|(one, other)| one.to_bits() != other.to_bits())
}
