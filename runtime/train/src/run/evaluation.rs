//! Evaluations of a run: when one is due, whether it is the best, and when the run ends.

use serde::{Deserialize, Serialize};

use crate::options::EvaluationOptions;

/// Order of evaluations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Lower is better, as for a loss.
    Lower,
    /// Higher is better, as for an accuracy.
    Higher,
}

/// The reason why an evaluation is due after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// The step is a multiple of `evaluate_every`.
    Scheduled,
    /// The step is the last one of the run, and no multiple. A longer run has no evaluation here.
    AtTheEnd,
}

/// Past evaluations, as a checkpoint stores them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Past {
    pub(crate) best: Option<f64>,
    /// Number of evaluations since the best one.
    pub(crate) since: u64,
}

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

    /// Continues after the evaluations of a checkpoint.
    pub(crate) fn resume(&mut self, past: Past) {
        self.past = past;
    }

    /// Returns why the model is evaluated after `made` of `steps` steps. `None` if it is not.
    pub(crate) fn due(&self, made: u64, steps: u64) -> Option<Due> {
        let every = self.options.evaluate_every? as u64;
        match made.is_multiple_of(every) {
            true => Some(Due::Scheduled),
            false => (made == steps).then_some(Due::AtTheEnd),
        }
    }

    /// Adds an evaluation. Returns whether it is the best one, which a NaN never is.
    pub(crate) fn add(&mut self, value: f64, due: Due) -> bool {
        let is_better = |best: f64| match self.better {
            Better::Lower => value < best,
            Better::Higher => value > best,
        };
        let is_best = !value.is_nan() && self.past.best.is_none_or(is_better);
        if is_best {
            self.past = Past { best: Some(value), since: 0 };
        } else if due == Due::Scheduled {
            self.past.since += 1;
        }
        is_best
    }

    /// Replaces the best evaluation, when its checkpoint is gone.
    pub(crate) fn set_best(&mut self, best: Option<f64>) {
        self.past.best = best;
    }

    /// Returns whether evaluations have not improved for as long as the patience lasts.
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
        let due = |made| evaluations(Better::Lower).due(made, 7);
        let scheduled = Some(Due::Scheduled);
        assert_eq!([1, 2, 3, 6].map(due), [None, None, scheduled, scheduled]);
        assert_eq!([7, 8, 9].map(due), [Some(Due::AtTheEnd), None, scheduled]);
        let never = Evaluations::new(EvaluationOptions::default(), Better::Lower);
        assert_eq!(never.due(7, 7), None);
    }

    #[test]
    fn an_evaluation_at_the_end_uses_up_no_patience() {
        let mut lower = evaluations(Better::Lower);
        assert!(lower.add(2.0, Due::AtTheEnd));
        for _ in 0..5 {
            assert!(!lower.add(3.0, Due::AtTheEnd));
        }
        assert!(!lower.is_enough());
    }

    #[test]
    fn a_run_ends_after_two_evaluations_without_a_better_one() {
        let mut lower = evaluations(Better::Lower);
        let values = [2.0, f64::NAN, 1.0, 1.0, f64::NAN];
        let added = values.map(|value| lower.add(value, Due::Scheduled));
        assert_eq!(added, [true, false, true, false, false]);
        assert!(lower.is_enough());
        let mut higher = evaluations(Better::Higher);
        let added = [2.0, 3.0, 1.0].map(|value| higher.add(value, Due::Scheduled));
        assert_eq!(added, [true, true, false]);
        assert!(!higher.is_enough());
        higher.resume(lower.past());
        assert!(higher.is_enough() && higher.past().best == Some(1.0));
    }
}
