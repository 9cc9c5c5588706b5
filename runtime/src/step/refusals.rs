//! The errors of calls: of those that have no place in the order of a step, and of those that
//! follow a call that failed.

use hsdp_comm::Error as CommError;
use hsdp_sharding::step::Refused;
use hsdp_sharding::{AfterForward, UnitId};

use crate::error::{DataError, Error};
use crate::state::context::Context;
use crate::step::step_state::GRADIENTS_BEFORE_LOSS;

/// A step or an evaluation that was begun: the step's number, the number of the attempt, and the
/// epoch of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttemptId {
    pub(crate) step: u64,
    pub(crate) attempt: u64,
    pub(crate) epoch: u64,
}

/// The microbatch, the attempt and the step that a caller means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MicrobatchId {
    pub(crate) attempt: AttemptId,
    pub(crate) microbatch: usize,
}

/// An attempt that is under way.
#[derive(Debug)]
pub(crate) struct AttemptState {
    pub(crate) id: AttemptId,
    /// The first error of this rank in it, for telling the others why it ended.
    failure: Option<String>,
    state: Wholeness,
}

/// How the calls of an attempt have ended so far.
#[derive(Debug)]
enum Wholeness {
    /// Each has done all of its work, or refused its arguments.
    Whole,
    /// A call is under way, or has failed or panicked in the middle of its work.
    Broken,
    /// All ranks discard the attempt, for this reason, which every later call has too.
    Discarded(CommError),
}

impl AttemptState {
    pub(crate) fn new(id: AttemptId) -> Self {
        Self { id, failure: None, state: Wholeness::Whole }
    }

    /// Returns the first error of this rank.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Notes an error of the caller as the reason for which the attempt will end, unless there is
    /// one.
    pub(crate) fn note_failure(&mut self, reason: impl FnOnce() -> String) {
        self.failure.get_or_insert_with(reason);
    }

    /// Notes that a call begins. Where it panics, and a caller catches that, the attempt stays
    /// broken.
    ///
    /// # Errors
    /// [`Error::Misuse`] and [`Error::Comm`] after an earlier call that has failed in the middle of
    /// its work: no other one can go on.
    pub(super) fn enter(
        &mut self,
        context: &Context,
        operation: &'static str,
        is_step: bool,
    ) -> Result<(), Error> {
        match &self.state {
            Wholeness::Whole => {
                self.state = Wholeness::Broken;
                Ok(())
            }
            Wholeness::Broken => {
                let caught = || "a call panicked, and the panic was caught".to_owned();
                let failure = self.failure.clone().unwrap_or_else(caught);
                let what = if is_step {
                    format!("an earlier call of the step failed ({failure}): drop the step")
                } else {
                    format!("{failure}: drop the evaluation")
                };
                Err(context.misuse(operation, self.id.step, what))
            }
            Wholeness::Discarded(error) => Err(Error::Comm(error.clone())),
        }
    }

    /// Notes how the call has ended that was entered last.
    pub(crate) fn leave<T>(&mut self, result: &Result<T, Error>) {
        if let Err(error) = result {
            self.note_failure(|| error.to_string());
        }
        self.state = match result {
            Err(Error::Comm(error)) if ends_all_calls(error) => Wholeness::Discarded(error.clone()),
            Err(
                Error::Misuse { .. }
                | Error::Size { .. }
                | Error::Data(DataError::UnevenInputs { .. } | DataError::EndOfData { .. }),
            )
            | Ok(_) => Wholeness::Whole,
            Err(_) => Wholeness::Broken,
        };
    }
}

/// Returns whether every later call of the attempt has this error too.
fn ends_all_calls(error: &CommError) -> bool {
    error.is_fatal() || matches!(error, CommError::StepAborted { .. })
}

/// Returns the error of a call that the machine of the step has refused, after `committed` steps
/// that an optimizer has completed.
pub(super) fn error(
    context: &Context,
    operation: &'static str,
    step: u64,
    committed: u64,
    refused: Refused,
) -> Error {
    let name = |unit: UnitId| &context.plan.spec()[unit].name;
    let what = match refused {
        Refused::UnevenInputs { microbatch, supply } => {
            return Error::Data(DataError::UnevenInputs { step, microbatch, supply });
        }
        Refused::UnevenEnds { ending, ready } => {
            return Error::Data(DataError::UnevenEnds { step, committed, ending, ready });
        }
        Refused::NoData { supply } => {
            return Error::Data(DataError::EndOfData { step, microbatch: Some(0), supply });
        }
        Refused::BeforeLoss { .. } => {
            "the backward pass begins with `loss`: ranks agree on a weight in that call".to_owned()
        }
        Refused::NoGatherLeft { unit, microbatch } => {
            let advice = match context.plan.spec()[unit].after_forward {
                AfterForward::Discard => "a gradient reaches it: do not mark it `forward_only`",
                _ => "hold on to it, or mark it `keep` to use it more than once",
            };
            format!(
                "unit {} has been gathered as often as the plan says for microbatch {microbatch}; \
                 {advice}",
                name(unit)
            )
        }
        Refused::OutOfOrder { unit, after } => format!(
            "unit {} is used after unit {}, which is declared behind it: declare the units in the \
             order of the forward, or choose UnitOrder::Follow",
            name(unit),
            name(after)
        ),
        Refused::SecondLoss { .. } => "this microbatch has its loss already".to_owned(),
        Refused::GradientsBeforeLoss { .. } => GRADIENTS_BEFORE_LOSS.to_owned(),
        Refused::Twice { unit, microbatch } => format!(
            "unit {} was reduced in microbatch {microbatch} before: add its gradients up, and reduce \
             their sum once",
            name(unit)
        ),
        Refused::TooLate { unit, microbatch } => format!(
            "the gradients of unit {} come too late in microbatch {microbatch}: a unit that follows \
             in the backward was unsharded before, and zeros were reduced in their place. Where \
             processes compute on devices, a unit is reduced before the next one is unsharded; with \
             Unused::Zeros, units are reduced at the end of the microbatch",
            name(unit)
        ),
        Refused::NoSuchStatistics { unit, index, count } => {
            format!("unit {} declares {count} statistics, and none of index {index}", name(unit))
        }
        Refused::StatisticsBeforeUnit { unit, index } => {
            format!("statistics {index} of unit {} come before the unit is unsharded", name(unit))
        }
        Refused::StatisticsPassed { unit, index, microbatch } => format!(
            "the statistics of {} in unit {} come twice in microbatch {microbatch}, or after those \
             that follow them: zeros were summed in their place. All ranks use the units in one \
             order, and a unit runs each of its norms once, in the order in which it declares them",
            context.plan.spec()[unit].statistics[index].name,
            name(unit)
        ),
        refused => refused.to_string(),
    };
    context.misuse(operation, step, what)
}
