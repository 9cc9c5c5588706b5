//! Evaluations of a run: when one is due, which is the best, and when there were enough.

use serde::{Deserialize, Serialize};

use crate::options::EvaluationOptions;

/// The better one of two evaluations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The lower one, as of a loss.
    Lower,
    /// The higher one, as of an accuracy.
    Higher,
}

/// The evaluations so far, as a checkpoint keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Past {
    /// The best evaluation.
    pub(crate) best: Option<f64>,
    /// Evaluations since the best one.
    pub(crate) since: u64,
}

/// The evaluations of a run.
#[derive(Clone, Debug)]
pub(crate) struct Evaluations {
    options: EvaluationOptions,
    better: Better,
    past: Past,
}

impl Evaluations {
    pub(crate) fn new(options: EvaluationOptions, better: Better) -> Self {
        Self { options, better, past: Past::default() }
    }

    pub(crate) fn past(&self) -> Past {
        self.past
    }

    /// Goes on after the evaluations of a checkpoint.
    pub(crate) fn resume(&mut self, past: Past) {
        self.past = past;
    }

    /// Returns whether the model is evaluated after step `number`, which may be the last one.
    pub(crate) fn is_due(&self, number: u64, is_last: bool) -> bool {
        let every = self.options.evaluate_every;
        every.is_some_and(|every| is_last || (number + 1).is_multiple_of(every as u64))
    }

    /// Adds an evaluation. Returns whether it is the best one. A NaN never is.
    pub(crate) fn add(&mut self, value: f64) -> bool {
        let is_better = |best: f64| match self.better {
            Better::Lower => value < best,
            Better::Higher => value > best,
        };
        let is_best = !value.is_nan() && self.past.best.is_none_or(is_better);
        if is_best {
            self.past = Past { best: Some(value), since: 0 };
        } else {
            self.past.since += 1;
        }
        is_best
    }

    /// Returns whether too many evaluations in a row have not improved.
    pub(crate) fn is_enough(&self) -> bool {
        self.options.patience.is_some_and(|patience| self.past.since >= patience as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluations(better: Better) -> Evaluations {
        let options =
            EvaluationOptions { evaluate_every: Some(3), patience: Some(2), save_best: false };
        Evaluations::new(options, better)
    }

    #[test]
    fn evaluations_are_due_after_every_third_step_and_the_last() {
        let due = |number, is_last| evaluations(Better::Lower).is_due(number, is_last);
        assert_eq!([0, 1, 2, 3, 5].map(|n| due(n, false)), [false, false, true, false, true]);
        assert!(due(3, true));
        let never = Evaluations::new(EvaluationOptions::default(), Better::Lower);
        assert!(!never.is_due(2, true));
    }

    #[test]
    fn a_run_ends_after_two_evaluations_without_a_better_one() {
        let mut lower = evaluations(Better::Lower);
        let values = [2.0, f64::NAN, 1.0, 1.0, f64::NAN];
        assert_eq!(values.map(|value| lower.add(value)), [true, false, true, false, false]);
        assert!(lower.is_enough());
        let mut higher = evaluations(Better::Higher);
        assert_eq!([2.0, 3.0, 1.0].map(|value| higher.add(value)), [true, true, false]);
        assert!(!higher.is_enough());
        higher.resume(lower.past());
        assert!(higher.is_enough() && higher.past().best == Some(1.0));
    }
}
