//! What a program feeds to the machine, and the reasons why an input is refused.

use super::rules::{Input, Supply};
use crate::{Phase, Rank, UnitId};

/// A step that begins, or the end of a rank's run in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Number of the step.
    pub step: u64,
    /// Beginning of the step, or end of the run.
    pub intent: Intent,
}

/// Intent of a rank where the next step would begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// The step.
    Step {
        /// Number of microbatches; `None` for as many as ranks have.
        microbatches: Option<usize>,
        /// Whether the rank has data.
        input: Input,
    },
    /// The end of its run: it makes no more steps.
    End,
}

impl Begin {
    /// Returns the beginning of a step for which the rank has data.
    #[must_use]
    pub const fn step(step: u64, microbatches: Option<usize>) -> Self {
        Self { step, intent: Intent::Step { microbatches, input: Input::Ready } }
    }
}

/// The input that is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    /// None: the last one was answered.
    Nothing,
    /// The beginning of a step, or the end of the run.
    Begin,
    /// The exchange about another microbatch or batch of this rank.
    Microbatch,
    /// A unit's parameters.
    Unit(UnitId),
    /// The sums of statistics of a unit.
    Statistics {
        /// The unit.
        unit: UnitId,
        /// Their index in the unit.
        index: usize,
        /// The half of the microbatch.
        phase: Phase,
    },
    /// The end of the forward.
    Loss,
    /// The reductions whose turn has come with a unit's gradients.
    Gradients(UnitId),
    /// The end of a microbatch or batch.
    EndMicrobatch,
    /// The end of the step, or of an evaluation.
    Finish,
    /// The gather of a unit's updated slices.
    Slices(UnitId),
    /// The ends of all gathers of slices.
    WholeShards,
}

/// The reason why an input is refused. The machine is as it was before, except after an error of
/// [`conclude`](super::StepMachine::conclude), which all ranks have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// The input before it is not answered, or the step or evaluation that it belongs to is not
    /// under way.
    #[error("{input} has no place here")]
    OutOfTurn {
        /// The input.
        input: &'static str,
    },
    /// A step of 0 microbatches.
    #[error("a step of 0 microbatches has nothing to reduce")]
    NoMicrobatches,
    /// A microbatch is open.
    #[error("microbatch {microbatch} was begun and not finished")]
    Unfinished {
        /// The microbatch.
        microbatch: usize,
    },
    /// The step has had all its microbatches.
    #[error("the step was begun with {count} microbatches, all are done")]
    AllDone {
        /// Their number.
        count: usize,
    },
    /// Microbatches are missing at the end of the step.
    #[error("{finished} microbatches are done, the step was begun with {count}")]
    Missing {
        /// Number of microbatches so far.
        finished: usize,
        /// Number that the step was begun with.
        count: usize,
    },
    /// The model has no such unit.
    #[error("there is no unit {unit}, the model has {units}")]
    NoSuchUnit {
        /// The unit.
        unit: UnitId,
        /// Number of units.
        units: usize,
    },
    /// The unit has no gather left in the microbatch.
    #[error("unit {unit} has been gathered as often as the plan says for microbatch {microbatch}")]
    NoGatherLeft {
        /// The unit.
        unit: UnitId,
        /// The microbatch.
        microbatch: usize,
    },
    /// The unit is used after one that is declared behind it, which the rules refuse.
    #[error("unit {unit} is used after unit {after}, which is declared behind it")]
    OutOfOrder {
        /// The unit.
        unit: UnitId,
        /// The unit behind it.
        after: UnitId,
    },
    /// A unit is needed for the backward before the loss.
    #[error("unit {unit} is needed for the backward before the loss")]
    BeforeLoss {
        /// The unit.
        unit: UnitId,
    },
    /// The unit declares fewer statistics.
    #[error("unit {unit} has {count} statistics, and none of index {index}")]
    NoSuchStatistics {
        /// The unit.
        unit: UnitId,
        /// Index of the statistics.
        index: usize,
        /// Number that the unit declares.
        count: usize,
    },
    /// The unit was not handed out for this half of the microbatch.
    #[error("statistics {index} of unit {unit} come before the unit is used")]
    StatisticsBeforeUnit {
        /// The unit.
        unit: UnitId,
        /// Index of the statistics.
        index: usize,
    },
    /// The turn of the statistics has passed: they were given before, or the program has come to
    /// statistics behind them.
    #[error("statistics {index} of unit {unit} come twice or too late in microbatch {microbatch}")]
    StatisticsPassed {
        /// The unit.
        unit: UnitId,
        /// Index of the statistics.
        index: usize,
        /// The microbatch.
        microbatch: usize,
    },
    /// The microbatch has its loss already.
    #[error("microbatch {microbatch} has its loss already")]
    SecondLoss {
        /// The microbatch.
        microbatch: usize,
    },
    /// Gradients come before the loss.
    #[error("gradients of unit {unit} come before the loss")]
    GradientsBeforeLoss {
        /// The unit.
        unit: UnitId,
    },
    /// The unit has no trainable parameter.
    #[error("unit {unit} has no trainable parameter")]
    Frozen {
        /// The unit.
        unit: UnitId,
    },
    /// The unit was reduced in this microbatch before.
    #[error("unit {unit} was reduced in microbatch {microbatch} before")]
    Twice {
        /// The unit.
        unit: UnitId,
        /// The microbatch.
        microbatch: usize,
    },
    /// The turn of the unit has passed, and zeros were reduced in place of its gradients.
    #[error("the gradients of unit {unit} come too late in microbatch {microbatch}")]
    TooLate {
        /// The unit.
        unit: UnitId,
        /// The microbatch.
        microbatch: usize,
    },
    /// Some ranks have data and others have none, which the rules refuse.
    #[error("ranks {} have data, and ranks {} have none", list(&supply.ready), list(&supply.exhausted))]
    UnevenInputs {
        /// The microbatch; `None` where the step begins.
        microbatch: Option<usize>,
        /// The ranks.
        supply: Supply,
    },
    /// Some ranks end their run, and others have data for another step.
    #[error("ranks {} end their run, and ranks {} have data", list(ending), list(ready))]
    UnevenEnds {
        /// Ranks that end.
        ending: Vec<Rank>,
        /// Ranks with data.
        ready: Vec<Rank>,
    },
    /// No rank has data for the first microbatch, or some have none.
    #[error("the step ends before its first microbatch: ranks {} have no data", list(&supply.exhausted))]
    NoData {
        /// The ranks.
        supply: Supply,
    },
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
