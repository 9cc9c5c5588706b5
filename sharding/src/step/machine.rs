//! The machine: its state, its inputs, and the outputs that answer them.

use std::sync::Arc;

use super::evaluation::EvaluationCourse;
use super::exchange::{Conclusion, Exchange};
use super::inputs::{Begin, Goal, Intent, Refused};
use super::order::PlanOrders;
use super::output::{Operation, Output};
use super::rules::{Course, EvaluationKind, Rules, Supply};
use super::training::{StepCourse, StepOpening};
use crate::{Phase, Plan, UnitId};

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
    orders: PlanOrders,
    state: MachineState,
    /// The input that is being answered.
    goal: Goal,
    awaits: Option<MachineAwaits>,
}

/// State of the rank: a step, an evaluation, or neither.
#[derive(Debug)]
enum MachineState {
    Between,
    Opening(Box<StepOpening>),
    Step(Box<StepCourse>),
    Evaluation(Box<EvaluationCourse>),
}

/// Operation or exchange that the machine waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MachineAwaits {
    Operation(Operation),
    Exchange(Exchange),
}

impl MachineState {
    fn step(&mut self, input: &'static str) -> Result<&mut StepCourse, Refused> {
        match self {
            Self::Step(step) => Ok(step),
            _ => Err(Refused::OutOfTurn { input }),
        }
    }

    fn evaluation(&mut self, input: &'static str) -> Result<&mut EvaluationCourse, Refused> {
        match self {
            Self::Evaluation(evaluation) => Ok(evaluation),
            _ => Err(Refused::OutOfTurn { input }),
        }
    }
}

impl StepMachine {
    /// Makes the machine of a model's rank. `plan` is in the declared order.
    #[must_use]
    pub fn new(plan: Arc<Plan>, rules: Rules) -> Self {
        let orders = PlanOrders::new(plan, rules);
        Self { orders, state: MachineState::Between, goal: Goal::Nothing, awaits: None }
    }

    /// Returns the plan in the order of units that is used from now on.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.orders.current().plan
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
            MachineState::Step(step) => step.gathers.found(),
            MachineState::Evaluation(evaluation) => evaluation.gathers.found(),
            MachineState::Between | MachineState::Opening(_) => &[],
        }
    }

    /// Returns whether a step is under way.
    #[must_use]
    pub fn is_in_step(&self) -> bool {
        matches!(self.state, MachineState::Step(_))
    }

    /// Returns whether a microbatch is open, or a batch of an evaluation. After
    /// [`begin_microbatch`](Self::begin_microbatch) there is none if the step ends because ranks
    /// have no more data.
    #[must_use]
    pub fn has_microbatch(&self) -> bool {
        match &self.state {
            MachineState::Step(step) => step.is_open(),
            MachineState::Evaluation(evaluation) => evaluation.is_open(),
            MachineState::Between | MachineState::Opening(_) => false,
        }
    }

    /// Returns the ranks with and without data, as of the last exchange about data in the step or
    /// the evaluation that is under way.
    #[must_use]
    pub fn supply(&self) -> Option<&Supply> {
        match &self.state {
            MachineState::Step(step) => Some(&step.supply),
            MachineState::Evaluation(evaluation) => Some(&evaluation.supply),
            MachineState::Between | MachineState::Opening(_) => None,
        }
    }

    /// Returns the number of microbatches that are finished in the step, or of batches in the
    /// evaluation. It is the number of the open one, too: they count from 0.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        match &self.state {
            MachineState::Step(step) => step.finished,
            MachineState::Evaluation(evaluation) => evaluation.batches,
            MachineState::Between | MachineState::Opening(_) => 0,
        }
    }

    /// Returns whether gathers of slices are due: in one sequence between an update and the gathers
    /// of its units, and otherwise between an agreement to gather slices again and the next output.
    #[must_use]
    pub fn has_slices_due(&self) -> bool {
        self.orders.slices.has_due()
    }

    /// Returns whether neither a step nor an evaluation is under way, and the last input is
    /// answered.
    #[must_use]
    pub fn is_between(&self) -> bool {
        matches!(self.state, MachineState::Between) && self.is_idle()
    }

    /// Returns whether the last input is answered, so that another one may follow.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.goal == Goal::Nothing && self.awaits.is_none()
    }
}

/// The inputs.
impl StepMachine {
    /// Begins a step, or ends the run. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::NoMicrobatches`], [`Refused::OutOfTurn`].
    pub fn begin(&mut self, begin: Begin) -> Result<(), Refused> {
        match (&self.state, self.goal, begin.intent) {
            (MachineState::Between, Goal::Nothing, Intent::Step { microbatches: Some(0), .. }) => {
                Err(Refused::NoMicrobatches)
            }
            (MachineState::Between, Goal::Nothing, _) => {
                self.state = MachineState::Opening(Box::new(StepOpening::new(begin)));
                self.goal = Goal::Begin;
                Ok(())
            }
            _ => Err(Refused::OutOfTurn { input: "begin" }),
        }
    }

    /// Begins the rank's next microbatch. Collective over the world if the step has no given number
    /// of microbatches. Afterwards [`has_microbatch`](Self::has_microbatch) tells whether there is
    /// one.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::AllDone`], [`Refused::OutOfTurn`].
    pub fn begin_microbatch(&mut self) -> Result<(), Refused> {
        self.check_idle("begin_microbatch")?;
        self.goal = self.state.step("begin_microbatch")?.begin_microbatch(&self.orders)?;
        Ok(())
    }

    /// Needs the parameters of a unit: the next gather of it.
    ///
    /// # Errors
    /// [`Refused::NoSuchUnit`], [`Refused::BeforeLoss`], [`Refused::NoGatherLeft`],
    /// [`Refused::OutOfOrder`], [`Refused::OutOfTurn`].
    pub fn need(&mut self, unit: UnitId) -> Result<(), Refused> {
        self.check_idle("need")?;
        self.check_unit(unit)?;
        self.goal = match &mut self.state {
            MachineState::Evaluation(evaluation) => evaluation.need(unit, &self.orders)?,
            state => state.step("need")?.need(unit, &self.orders)?,
        };
        Ok(())
    }

    /// Has statistics of a batch in the forward or the backward of a unit. Collective over the
    /// world: their sums over all ranks are there when it is answered.
    ///
    /// # Errors
    /// [`Refused::NoSuchUnit`], [`Refused::NoSuchStatistics`], [`Refused::StatisticsBeforeUnit`],
    /// [`Refused::StatisticsPassed`], [`Refused::OutOfTurn`].
    pub fn statistics(&mut self, unit: UnitId, index: usize, phase: Phase) -> Result<(), Refused> {
        self.check_idle("statistics")?;
        self.check_unit(unit)?;
        let step = self.state.step("statistics")?;
        self.goal = step.statistics(unit, index, phase, &self.orders)?;
        Ok(())
    }

    /// Has the loss of the microbatch, whose forward is over.
    ///
    /// # Errors
    /// [`Refused::SecondLoss`], [`Refused::OutOfTurn`].
    pub fn loss(&mut self) -> Result<(), Refused> {
        self.check_idle("loss")?;
        self.goal = self.state.step("loss")?.loss()?;
        Ok(())
    }

    /// Has the gradients of a unit.
    ///
    /// # Errors
    /// [`Refused::NoSuchUnit`], [`Refused::Frozen`], [`Refused::GradientsBeforeLoss`],
    /// [`Refused::Twice`], [`Refused::TooLate`], [`Refused::OutOfTurn`].
    pub fn offer(&mut self, unit: UnitId) -> Result<(), Refused> {
        self.check_unit(unit)?;
        self.check_idle("offer")?;
        self.goal = self.state.step("offer")?.offer(unit, &self.orders)?;
        Ok(())
    }

    /// Ends the microbatch, or the batch of an evaluation.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`] if none is open.
    pub fn end_microbatch(&mut self) -> Result<(), Refused> {
        self.check_idle("end_microbatch")?;
        self.goal = match &mut self.state {
            MachineState::Evaluation(evaluation) => evaluation.end_batch()?,
            state => state.step("end_microbatch")?.end_microbatch()?,
        };
        Ok(())
    }

    /// Ends the step. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::Missing`], [`Refused::NoData`], [`Refused::OutOfTurn`].
    pub fn finish(&mut self) -> Result<(), Refused> {
        self.check_idle("finish")?;
        self.goal = self.state.step("finish")?.finish(&self.orders)?;
        Ok(())
    }

    /// Begins an evaluation. Not collective, but all ranks begin one of the same kind.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`].
    pub fn evaluate(&mut self, kind: EvaluationKind) -> Result<(), Refused> {
        self.check_idle("evaluate")?;
        if !matches!(self.state, MachineState::Between) {
            return Err(Refused::OutOfTurn { input: "evaluate" });
        }
        self.state = MachineState::Evaluation(Box::new(EvaluationCourse::new(kind)));
        Ok(())
    }

    /// Begins this rank's next batch. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::OutOfTurn`].
    pub fn begin_batch(&mut self) -> Result<(), Refused> {
        self.check_idle("begin_batch")?;
        self.goal = self.state.evaluation("begin_batch")?.begin_batch()?;
        Ok(())
    }

    /// Takes part in the batches that other ranks still have, exchanges sums, and ends the
    /// evaluation. Collective over the world.
    ///
    /// # Errors
    /// [`Refused::Unfinished`], [`Refused::OutOfTurn`].
    pub fn end_evaluation(&mut self) -> Result<(), Refused> {
        self.check_idle("end_evaluation")?;
        self.goal = self.state.evaluation("end_evaluation")?.end()?;
        Ok(())
    }

    /// Has updated its slice of a unit. Collective over the replicate group, in the plan's
    /// [order of updates](Plan::update_order). In [one sequence](super::Sequences::One) nothing
    /// follows: the slices are gathered just before the unit's next gather, and so during the
    /// forward.
    ///
    /// # Errors
    /// [`Refused::NoSuchUnit`]; [`Refused::Frozen`] if the unit is frozen; [`Refused::OutOfTurn`]
    /// if replicas do not divide state, within a step, and before the slices of the last update are
    /// gathered.
    pub fn updated(&mut self, unit: UnitId) -> Result<(), Refused> {
        self.check_unit(unit)?;
        self.check_between("updated")?;
        let PlanOrders { slices, .. } = &self.orders;
        let is_whole = !slices.is_due(unit) && !slices.is_under_way(unit);
        if !self.plan().divides_state() || !is_whole {
            return Err(Refused::OutOfTurn { input: "updated" });
        }
        if !self.plan().spec()[unit].is_trainable() {
            return Err(Refused::Frozen { unit });
        }
        self.orders.slices.make_due(unit);
        self.goal = Goal::Slices(unit);
        Ok(())
    }

    /// Has the slices of all units gathered once more, outside of a step: gathers of the last
    /// update were lost on a rank, and all ranks know it. They follow the next input. Where a step
    /// begins, the headers say so ([`Headers::gathers_again`](super::Headers)), and in an
    /// evaluation the records about batches ([`Batches::gathers_again`](super::Batches)).
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`].
    pub fn gather_again(&mut self) -> Result<(), Refused> {
        self.check_between("gather_again")?;
        self.orders.gather_again();
        Ok(())
    }

    /// Needs whole shards outside of a step: issues the gathers of slices that are due, and waits
    /// for those that are under way. Collective over the replicate group in one sequence.
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`].
    pub fn await_slices(&mut self) -> Result<(), Refused> {
        self.check_between("await_slices")?;
        self.goal = Goal::WholeShards;
        Ok(())
    }

    fn check_between(&self, input: &'static str) -> Result<(), Refused> {
        self.check_idle(input)?;
        match self.state {
            MachineState::Between => Ok(()),
            _ => Err(Refused::OutOfTurn { input }),
        }
    }

    /// Ends the step or the evaluation that is under way. The order of units that it has found is
    /// forgotten: another rank may not have found it. So are gathers of slices that are
    /// [due](Self::has_slices_due).
    pub fn abort(&mut self) {
        self.state = MachineState::Between;
        self.goal = Goal::Nothing;
        self.awaits = None;
        self.orders.forget();
        self.orders.slices.abort();
    }

    fn check_idle(&self, input: &'static str) -> Result<(), Refused> {
        if self.is_idle() { Ok(()) } else { Err(Refused::OutOfTurn { input }) }
    }

    fn check_unit(&self, unit: UnitId) -> Result<(), Refused> {
        let units = self.plan().spec().units().len();
        if unit.index() < units { Ok(()) } else { Err(Refused::NoSuchUnit { unit, units }) }
    }
}

/// The outputs, and their answers.
impl StepMachine {
    /// Returns the next output; `None` if the input is answered, and while the machine waits.
    pub fn poll(&mut self) -> Option<Output> {
        if self.awaits.is_some() {
            return None;
        }
        let output = self.next();
        if let Some(Output::GatherSlices(unit)) = output {
            self.orders.slices.issued(unit);
        }
        let is_answered = match output {
            None => true,
            Some(Output::Hand { .. }) => matches!(self.goal, Goal::Unit(_)),
            Some(Output::GatherSlices(unit)) => self.goal == Goal::Slices(unit),
            Some(_) => false,
        };
        if is_answered {
            self.goal = Goal::Nothing;
        }
        self.awaits = match output? {
            Output::Await(operation) | Output::Follow(operation) => {
                Some(MachineAwaits::Operation(operation))
            }
            Output::Exchange(exchange) => Some(MachineAwaits::Exchange(exchange)),
            _ => None,
        };
        output
    }

    /// Returns the next output to the goal.
    fn next(&mut self) -> Option<Output> {
        if self.goal != Goal::Nothing
            && !self.orders.rules.is_one_sequence()
            && let Some(output) = self.orders.slices_due_next()
        {
            return Some(output);
        }
        match &mut self.state {
            MachineState::Between if self.goal == Goal::WholeShards => {
                self.orders.whole_shards_next()
            }
            MachineState::Between => None,
            MachineState::Opening(opening) => {
                let whole = opening.compares_replicas().then(|| self.orders.whole_shards_next());
                whole.flatten().or_else(|| Some(opening.next()))
            }
            MachineState::Step(step) => step.next(self.goal, &mut self.orders),
            MachineState::Evaluation(evaluation) => evaluation.next(self.goal, &mut self.orders),
        }
    }

    /// Returns the operation whose completion the host reports when it sees it, though the machine
    /// does not wait for it.
    #[must_use]
    pub fn watching(&self) -> Option<Operation> {
        match &self.state {
            MachineState::Step(step) => step.watching(&self.orders),
            MachineState::Evaluation(evaluation) => evaluation.gathers.watching(&self.orders),
            MachineState::Between | MachineState::Opening(_) => None,
        }
    }

    /// Reports that an operation is complete: the one that the machine waits for, or the one that
    /// it [watches](Self::watching).
    ///
    /// # Errors
    /// [`Refused::OutOfTurn`] for any other one.
    pub fn done(&mut self, operation: Operation) -> Result<(), Refused> {
        if self.awaits == Some(MachineAwaits::Operation(operation)) {
            self.awaits = None;
        } else if self.watching() != Some(operation) {
            return Err(Refused::OutOfTurn { input: "done" });
        }
        if let Operation::GatherSlices(unit) = operation {
            self.orders.slices.complete(unit);
            return Ok(());
        }
        match &mut self.state {
            MachineState::Step(step) => step.complete(operation),
            MachineState::Evaluation(evaluation) => evaluation.gathers.complete(operation),
            MachineState::Between | MachineState::Opening(_) => {}
        }
        Ok(())
    }

    /// Reports the conclusion from the exchange that the machine waits for.
    ///
    /// # Errors
    /// [`Refused::UnevenInputs`] and [`Refused::UnevenEnds`] as the rules say, and
    /// [`Refused::NoData`] if a step that ends has had no microbatch: all ranks have the same
    /// error. [`Refused::OutOfTurn`] if the conclusion is from another exchange.
    pub fn conclude(&mut self, conclusion: Conclusion) -> Result<(), Refused> {
        let exchange = match self.awaits {
            Some(MachineAwaits::Exchange(exchange)) if exchange.has(&conclusion) => exchange,
            _ => return Err(Refused::OutOfTurn { input: "conclude" }),
        };
        self.awaits = None;
        let concluded = self.take_conclusion(exchange, conclusion);
        let is_answered = self.goal == Goal::Microbatch
            || matches!(exchange, Exchange::Statement | Exchange::Mean);
        if concluded.is_err() || is_answered {
            self.goal = Goal::Nothing;
        }
        concluded
    }

    fn take_conclusion(
        &mut self,
        exchange: Exchange,
        conclusion: Conclusion,
    ) -> Result<(), Refused> {
        let Self { orders, state, goal, .. } = self;
        match state {
            MachineState::Between => {}
            MachineState::Opening(opening) => {
                let begun = match opening.conclude(conclusion, orders) {
                    Ok(None) => return Ok(()),
                    Ok(Some(Course::Goes)) => Ok(opening.step(orders)),
                    Ok(Some(Course::Ends)) => Ok(None),
                    Err(refused) => Err(refused),
                };
                *state = MachineState::Between;
                if let Some(step) = begun? {
                    *state = MachineState::Step(Box::new(step));
                }
            }
            MachineState::Step(_) if exchange == Exchange::Statement => {
                orders.settle();
                *state = MachineState::Between;
            }
            MachineState::Evaluation(_) if exchange == Exchange::Mean => {
                *state = MachineState::Between;
            }
            MachineState::Step(step) => step.conclude(conclusion, *goal, orders)?,
            MachineState::Evaluation(evaluation) => evaluation.conclude(conclusion, orders),
        }
        Ok(())
    }
}
