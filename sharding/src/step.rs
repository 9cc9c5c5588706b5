//! The order of a step: a state machine that decides which operations a rank issues, and when.
//!
//! The machine of a rank lives as long as its model. Its host feeds it with what the program does
//! (inputs), and carries out what it says (outputs), one by one. It does nothing itself: it holds
//! no buffer and no value, starts no thread, and reads no clock. So one machine drives the runtime,
//! which executes the outputs, and the simulator, which gives each of them a time.
//!
//! | input | the program | what follows, besides gathers ahead |
//! |---|---|---|
//! | [`begin`](StepMachine::begin) | begins a step, or ends its run | exchanges of headers |
//! | [`begin_microbatch`](StepMachine::begin_microbatch) | begins a microbatch | an exchange, if the number of microbatches was not given |
//! | [`need`](StepMachine::need) | needs a unit's parameters | its gather, and the unit |
//! | [`loss`](StepMachine::loss) | has the loss | the rest of the forward's gathers |
//! | [`offer`](StepMachine::offer) | has a unit's gradients | reductions whose turn has come |
//! | [`end_microbatch`](StepMachine::end_microbatch) | ends the microbatch, or a batch of an evaluation | all gathers and reductions that are left |
//! | [`finish`](StepMachine::finish) | ends the step | microbatches of other ranks, all-reduces, the statement |
//! | [`evaluate`](StepMachine::evaluate), [`begin_batch`](StepMachine::begin_batch), [`mean`](StepMachine::mean) | evaluates | exchanges, gathers |
//! | [`abort`](StepMachine::abort) | drops the step | nothing |
//!
//! After an input, the host takes outputs from [`poll`](StepMachine::poll) until there is none, and
//! then feeds the next input. Two outputs make the machine wait: after [`Output::Await`] and
//! [`Output::Follow`] nothing comes until [`done`](StepMachine::done), and after
//! [`Output::Exchange`] until [`conclude`](StepMachine::conclude) with what the ranks have said.
//!
//! An all-reduce may begin while the backward goes on, as soon as the reduce-scatter before it is
//! complete. [`watching`](StepMachine::watching) names that reduce-scatter: its completion, and no
//! other one, is an input that the program does not cause. Where all operations of a rank are
//! [one sequence](Sequences::One), there is none.
//!
//! # Text
//!
//! An output is displayed as a word, such as in `g0 (g0) u0 r0`:
//!
//! | word | output |
//! |---|---|
//! | `g1`, `g1'` | the gather of unit 1 for the forward is issued; for the backward |
//! | `u1`, `u1'` | the gathered unit is handed out |
//! | `d1`, `d1'` | the gathered unit is not used, and dropped |
//! | `l1` | the unit's gradients are accumulated unsharded |
//! | `r1` | its reduce-scatter is issued |
//! | `a1` | its all-reduce is issued |
//! | `f1` | its all-reduced sums of a microbatch are added to its partial |
//! | `(g1)` | the rank waits for an operation |
//! | `<headers>` | the ranks exchange records |

mod call;
mod dry_run;
mod evaluation;
mod finding;
mod finish;
mod gathers;
mod opening;
mod order;
mod output;
mod reductions;
mod refused;
mod rules;
mod supply;
#[cfg(test)]
mod tests;
mod training;
mod units;

use std::sync::Arc;

pub use self::call::{Call, Kind, Members};
pub use self::dry_run::DryRun;
use self::evaluation::Evaluation;
use self::opening::Opening;
use self::order::Orders;
pub use self::output::{Exchange, Operation, Output, Source, Target};
pub use self::refused::Refused;
pub use self::rules::{LossScale, ReductionTime, Rules, Sequences, UnitOrder, Weights};
pub use self::supply::{Course, Input, Supply, Uneven};
use self::training::Training;
pub use self::units::{NextUnit, UnitUse};
use crate::{Plan, Rank, UnitId};

/// The order of a rank's steps and evaluations, decided input by input.
///
/// ```
/// use std::sync::Arc;
/// # use hsdp_sharding::{Mesh, ModelSpec, Param, Plan, PlanOptions, Unit, UnitId};
/// use hsdp_sharding::step::{Begin, Conclusion, Headers, Output, Rules, StepMachine, UnitOrder};
///
/// # let spec = ModelSpec::new().unit(Unit::new("a").param(Param::new("w", [4])));
/// # let plan = Plan::new(spec, Mesh::new(1, 2)?, PlanOptions::default())?;
/// let mut machine = StepMachine::new(Arc::new(plan), Rules::default());
/// machine.begin(Begin::step(0, Some(1))).expect("no step is under way");
/// let mut words = Vec::new();
/// while let Some(output) = machine.poll() {
///     words.push(output.to_string());
///     if let Output::Exchange(_) = output {
///         machine.conclude(Conclusion::Headers(Headers::of_data(2))).expect("two ranks with data");
///     }
/// }
/// assert_eq!(words, ["<headers>"]);
/// # Ok::<(), hsdp_sharding::Error>(())
/// ```
#[derive(Debug)]
pub struct StepMachine {
    plan: Arc<Plan>,
    rules: Rules,
    orders: Orders,
    state: State,
    /// The input that is being answered.
    goal: Goal,
    awaited: Option<Awaited>,
}

/// State of the rank: a step, an evaluation, or neither.
#[derive(Debug)]
enum State {
    Between,
    Opening(Box<Opening>),
    Step(Box<Training>),
    Evaluation(Box<Evaluation>),
}

/// The input that is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// None: the last one was answered.
    Nothing,
    /// The beginning of a step, or the end of the run.
    Begin,
    /// The exchange about another microbatch of this rank.
    Microbatch,
    /// A unit, whose gather has this place once it is known.
    Unit { unit: UnitId, place: Option<usize> },
    /// The end of the forward.
    Loss,
    /// The reductions whose turn has come with a unit's gradients, which are taken once the order
    /// of units is known.
    Gradients { unit: UnitId, are_taken: bool },
    /// The end of a microbatch.
    EndMicrobatch,
    /// The end of the step.
    Finish,
    /// The exchange about another batch of this rank.
    Batch,
    /// The end of a batch.
    EndBatch,
    /// The mean of an evaluation.
    Mean,
}

/// Operation or exchange that the machine waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Operation(Operation),
    Exchange(Exchange),
}

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

/// Conclusion from the headers of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers {
    /// Ranks with and without data. A rank that ends its run has none.
    pub supply: Supply,
    /// Ranks that end their run.
    pub ending: Vec<Rank>,
    /// Largest hint of the weight of a microbatch; 0 if no rank gave one.
    pub weight_hint: u64,
    /// Whether a rank names its samples, which are compared then.
    pub names_samples: bool,
}

impl Headers {
    /// Returns the headers of `ranks` ranks, which all have data, name no samples and give no hint.
    #[must_use]
    pub fn of_data(ranks: usize) -> Self {
        let supply = Supply::of((0..ranks).map(|_| Input::Ready));
        Self { supply, ..Self::default() }
    }
}

/// The conclusion of all ranks from the records that they have exchanged. It is equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// From [`Exchange::Headers`].
    Headers(Headers),
    /// From [`Exchange::Microbatch`] and [`Exchange::Batch`].
    Supply(Supply),
    /// From [`Exchange::Unit`]: the place after which it comes, and what follows there.
    Unit(usize, NextUnit),
    /// From [`Exchange::Interim`]: the largest number of all-reduces that a rank has issued, if a
    /// partial has overflowed on some rank.
    Overflow(Option<usize>),
    /// From any other exchange: the ranks agree.
    Agreed,
}

impl StepMachine {
    /// Makes the machine of a model's rank. `plan` is in the declared order.
    #[must_use]
    pub fn new(plan: Arc<Plan>, rules: Rules) -> Self {
        let orders = Orders::new(Arc::clone(&plan), rules.order);
        Self { plan, rules, orders, state: State::Between, goal: Goal::Nothing, awaited: None }
    }

    /// Returns the plan in the order of units that is used from now on.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.orders.current().plan
    }

    /// Returns the plan in the order that all ranks have kept; as declared before that.
    #[must_use]
    pub fn settled(&self) -> &Arc<Plan> {
        &self.orders.settled().plan
    }

    /// Returns whether all ranks have kept an order.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.orders.is_settled()
    }

    /// Returns the units that the open forward has gathered, if it finds the order of the units:
    /// a record of [`Exchange::Unit`] is about one behind some of them.
    #[must_use]
    pub fn found(&self) -> &[UnitId] {
        match &self.state {
            State::Step(training) => training.gathers.found(),
            State::Evaluation(evaluation) => evaluation.gathers.found(),
            State::Between | State::Opening(_) => &[],
        }
    }

    /// Returns whether a step is under way.
    #[must_use]
    pub fn is_in_step(&self) -> bool {
        matches!(self.state, State::Step(_))
    }

    /// Returns whether the last input is answered, so that another one may follow.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.goal == Goal::Nothing && self.awaited.is_none()
    }

    /// Begins a step, or ends the run. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`].
    pub fn begin(&mut self, begin: Begin) -> Result<(), Refused> {
        match (&self.state, self.goal, begin.intent) {
            (State::Between, Goal::Nothing, Intent::Step { microbatches: Some(0), .. }) => {
                Err(Refused::NoMicrobatches)
            }
            (State::Between, Goal::Nothing, _) => {
                self.state = State::Opening(Box::new(Opening::new(begin)));
                self.goal = Goal::Begin;
                Ok(())
            }
            _ => Err(Refused::OutOfTurn { input: "begin" }),
        }
    }

    /// Ends the step or the evaluation that is under way. The order of units that it has found is
    /// forgotten: another rank may not have found it.
    pub fn abort(&mut self) {
        (self.state, self.goal, self.awaited) = (State::Between, Goal::Nothing, None);
        self.orders.forget();
    }

    /// Returns the next output; `None` if the input is answered, and while the machine waits.
    pub fn poll(&mut self) -> Option<Output> {
        if self.awaited.is_some() {
            return None;
        }
        let output = self.next()?;
        self.awaited = match output {
            Output::Await(operation) | Output::Follow(operation) => {
                Some(Awaited::Operation(operation))
            }
            Output::Exchange(exchange) => Some(Awaited::Exchange(exchange)),
            _ => None,
        };
        Some(output)
    }

    /// Returns the operation whose completion the host reports when it sees it, though the machine
    /// does not wait for it.
    #[must_use]
    pub fn watching(&self) -> Option<Operation> {
        match &self.state {
            State::Step(training) => training.watching(self.plan(), &self.rules),
            _ => None,
        }
    }

    /// Reports that an operation is complete: the one that the machine waits for, or the one that
    /// it [watches](Self::watching).
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`] for any other one.
    pub fn done(&mut self, operation: Operation) -> Result<(), Refused> {
        if self.awaited == Some(Awaited::Operation(operation)) {
            self.awaited = None;
        } else if self.watching() != Some(operation) {
            return Err(Refused::OutOfTurn { input: "done" });
        }
        match &mut self.state {
            State::Step(training) => training.complete(operation),
            State::Evaluation(evaluation) => evaluation.gathers.complete(operation),
            State::Between | State::Opening(_) => {}
        }
        Ok(())
    }

    /// Reports the conclusion from the exchange that the machine waits for.
    ///
    /// # Errors
    /// [`Refused::UnevenInputs`] and [`Refused::UnevenEnds`] as the rules say, and
    /// [`Refused::NoData`] if a step that ends has had no microbatch: all ranks have the same error.
    /// [`Refused::OutOfTurn`] if the conclusion is from another exchange.
    pub fn conclude(&mut self, conclusion: Conclusion) -> Result<(), Refused> {
        let Some(Awaited::Exchange(exchange)) = self.awaited else {
            return Err(Refused::OutOfTurn { input: "conclude" });
        };
        if !exchange.has(&conclusion) {
            return Err(Refused::OutOfTurn { input: "conclude" });
        }
        self.awaited = None;
        let concluded = self.take_conclusion(exchange, conclusion);
        if concluded.is_err() {
            self.goal = Goal::Nothing;
        }
        concluded
    }
}
