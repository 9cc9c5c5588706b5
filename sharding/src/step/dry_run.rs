//! A step without ranks: what the machine says to a program that uses each unit once.

use std::fmt;
use std::sync::Arc;

use super::exchange::{Conclusion, Exchange, Headers, NextUnit};
use super::inputs::{Begin, Refused};
use super::machine::StepMachine;
use super::output::Output;
use super::rules::{Input, Rules, Supply};
use crate::{AfterForward, Phase, Plan, UnitId};

/// The outputs of a step, as one rank of a world has them whose ranks all do the same.
///
/// The program uses each unit once in the forward, in the plan's order, and once in the backward.
/// All operations complete at once, so that all-reduces begin as early as they can.
///
/// ```
/// # use std::sync::Arc;
/// # use hsdp_sharding::{Mesh, ModelSpec, Param, Plan, PlanOptions, Unit};
/// use hsdp_sharding::step::{DryRun, Rules};
///
/// # let spec = ModelSpec::new().unit(Unit::new("a").param(Param::new("w", [4])));
/// # let plan = Plan::new(spec, Mesh::new(2, 2)?, PlanOptions::default())?;
/// let step = DryRun::of(&Arc::new(plan), Rules::default(), Some(1), 1);
/// let expected = "opening       <headers>\n\
///                 microbatch 0  g0 g0' (g0) u0 <weights> (g0') u0' r0 a0\n\
///                 finish        (a0) <statement>";
/// assert_eq!(step.to_string(), expected);
/// # Ok::<(), hsdp_sharding::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DryRun {
    /// Outputs before the first microbatch.
    pub opening: Vec<Output>,
    /// Outputs of each microbatch.
    pub microbatches: Vec<Vec<Output>>,
    /// Outputs after the last microbatch.
    pub finish: Vec<Output>,
    /// Outputs after the update, if replicas divide state. In one sequence there are none.
    pub update: Vec<Output>,
}

impl DryRun {
    /// Runs the first step of a model: of `microbatches` microbatches if the number is given, and
    /// of `count` if ranks ask each other. In one sequence there is an update before it, if
    /// replicas divide state: its slices are gathered in the first forward.
    ///
    /// # Panics
    /// If the number is 0.
    #[must_use]
    pub fn of(plan: &Arc<Plan>, rules: Rules, microbatches: Option<usize>, count: usize) -> Self {
        let mut host = DryHost::new(plan, rules);
        let updated = || plan.update_order().filter(|_| plan.divides_state());
        if rules.is_one_sequence() {
            for unit in updated() {
                host.feed(|machine| machine.updated(unit));
            }
        }
        let opening = host.feed(|machine| machine.begin(Begin::step(0, microbatches)));
        let each = 0..microbatches.unwrap_or(count);
        let microbatches = each.map(|_| host.microbatch(plan)).collect();
        let finish = host.feed(StepMachine::finish);
        let update =
            updated().flat_map(|unit| host.feed(|machine| machine.updated(unit))).collect();
        Self { opening, microbatches, finish, update }
    }

    /// Returns all outputs, in order.
    pub fn outputs(&self) -> impl Iterator<Item = Output> {
        let all = self.opening.iter().chain(self.microbatches.iter().flatten());
        all.chain(&self.finish).chain(&self.update).copied()
    }
}

/// Shows the [words](super#text) of the outputs, a line for each part of the step.
impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let microbatches = self.microbatches.iter().enumerate();
        let microbatches =
            microbatches.map(|(index, outputs)| (format!("microbatch {index}"), outputs));
        let lines = std::iter::once(("opening".to_owned(), &self.opening))
            .chain(microbatches)
            .chain([("finish".to_owned(), &self.finish), ("update".to_owned(), &self.update)])
            .filter(|(part, outputs)| part != "update" || !outputs.is_empty());
        for (index, (part, outputs)) in lines.enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{part:<13}")?;
            outputs.iter().try_for_each(|output| write!(f, " {output}"))?;
        }
        Ok(())
    }
}

/// The host of the rank.
struct DryHost {
    machine: StepMachine,
    /// Number of ranks.
    ranks: usize,
    declared: Vec<UnitId>,
}

impl DryHost {
    fn new(plan: &Arc<Plan>, rules: Rules) -> Self {
        let machine = StepMachine::new(Arc::clone(plan), rules);
        Self { machine, ranks: plan.mesh().world_size(), declared: plan.order().to_vec() }
    }

    fn microbatch(&mut self, plan: &Plan) -> Vec<Output> {
        let mut outputs = self.feed(StepMachine::begin_microbatch);
        for unit in plan.order() {
            outputs.extend(self.feed(|machine| machine.need(*unit)));
            for index in 0..plan.spec()[*unit].statistics.len() {
                outputs.extend(self.feed(|it| it.statistics(*unit, index, Phase::Forward)));
            }
        }
        outputs.extend(self.feed(StepMachine::loss));
        for unit in plan.order().iter().rev() {
            let spec = &plan.spec()[*unit];
            if spec.after_forward == AfterForward::Reshard {
                outputs.extend(self.feed(|machine| machine.need(*unit)));
            }
            for index in (0..spec.statistics.len()).rev() {
                outputs.extend(self.feed(|it| it.statistics(*unit, index, Phase::Backward)));
            }
            if spec.is_trainable() {
                outputs.extend(self.feed(|machine| machine.offer(*unit)));
            }
        }
        outputs.extend(self.feed(StepMachine::end_microbatch));
        outputs
    }

    fn feed(&mut self, input: impl FnOnce(&mut StepMachine) -> Result<(), Refused>) -> Vec<Output> {
        input(&mut self.machine).expect("the program keeps to the order of a step");
        let mut outputs = Vec::new();
        loop {
            while let Some(output) = self.machine.poll() {
                outputs.push(output);
                let answered = match output {
                    Output::Await(operation) | Output::Follow(operation) => {
                        self.machine.done(operation)
                    }
                    Output::Exchange(exchange) => {
                        let conclusion = self.conclusion(exchange);
                        self.machine.conclude(conclusion)
                    }
                    _ => Ok(()),
                };
                answered.expect("the machine waits for it");
            }
            match self.machine.watching() {
                Some(operation) => self.machine.done(operation).expect("it is watched"),
                None => return outputs,
            }
        }
    }

    /// Returns the conclusion of ranks that all say the same.
    fn conclusion(&self, exchange: Exchange) -> Conclusion {
        let supply = |input: Input| Supply::of((0..self.ranks).map(|_| input));
        match exchange {
            Exchange::Headers => Conclusion::Headers(Headers::of_data(self.ranks)),
            Exchange::Microbatch(input) => Conclusion::Supply(supply(input)),
            Exchange::Unit { says, place } => {
                let (place, next) = NextUnit::of(&vec![(says, place); self.ranks], &self.declared);
                Conclusion::Unit(place, next)
            }
            Exchange::Interim { .. } => Conclusion::Overflow(None),
            _ => Conclusion::Agreed,
        }
    }
}
