//! The machines of a world's ranks, driven by programs alone: nothing is computed or moved.

use std::collections::VecDeque;
use std::sync::Arc;

use hsdp::{LossScaling, ModelOptions, Objective, Unused};
use hsdp_sharding::step::{
    Batches, Begin, Conclusion, EvaluationKind, Exchange, Headers, Input, Intent, LossScale,
    MicrobatchWeights, NextUnit, Operation, Output, ReductionTime, Rules, Sequences, StepMachine,
    Supply, UnitUse,
};
use hsdp_sharding::{Plan, Rank, UnitId};

use crate::support::programs::{Call, Part, Program};

/// An output, and its place in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Number of the step; in an evaluation, of the next one.
    pub step: u64,
    /// Number of the microbatch; behind the last one, its number.
    pub microbatch: usize,
    /// Output of the machine.
    pub output: Output,
}

/// Returns the rules of a model with these options.
#[must_use]
pub fn rules(options: &ModelOptions, sequences: Sequences) -> Rules {
    Rules {
        sequences,
        order: options.order,
        uneven: options.uneven,
        reductions: match options.unused {
            Unused::Zeros => ReductionTime::AtTheEnd,
            _ => ReductionTime::InTurn,
        },
        weights: match options.objective {
            Objective::RankMean => MicrobatchWeights::Ignored,
            _ => MicrobatchWeights::Enter,
        },
        loss_scale: match options.loss_scaling {
            LossScaling::Dynamic(_) => LossScale::Dynamic,
            _ => LossScale::Fixed,
        },
        compare_replicas: options.compare_replicas,
    }
}

/// Returns what the machine of each rank says to its program.
///
/// A reduce-scatter over one rank is complete when it is issued. Of the others, none is complete
/// before the machine waits for it.
///
/// # Panics
/// If a program does not keep to the order of a step, or the ranks meet in different exchanges.
#[must_use]
pub fn outputs(plan: &Arc<Plan>, rules: Rules, programs: &[Program]) -> Vec<Vec<Placed>> {
    let member = |program| Member::new(StepMachine::new(Arc::clone(plan), rules), plan, program);
    let mut members: Vec<Member> = programs.iter().map(member).collect();
    loop {
        members.iter_mut().for_each(Member::go_on);
        let exchanges: Vec<Exchange> = members.iter().filter_map(|it| it.exchange).collect();
        if exchanges.is_empty() {
            return members.into_iter().map(|member| member.said).collect();
        }
        assert_eq!(exchanges.len(), members.len(), "some ranks are over, others say {exchanges:?}");
        let conclusion = conclusion(plan, &members, &exchanges);
        for member in &mut members {
            member.exchange = None;
            member.machine.conclude(conclusion.clone()).expect("all ranks go on");
        }
    }
}

/// An input of a machine.
#[derive(Clone, Copy, Debug)]
enum Feed {
    Begin {
        intent: Intent,
        names_samples: bool,
    },
    Microbatch,
    Call(Call),
    EndMicrobatch,
    Finish,
    /// Updates of all units, in the order of the forward.
    Update,
    Updated(UnitId),
    Evaluate(EvaluationKind),
    Batch,
    EndEvaluation,
}

/// The machine of a rank, and its program.
struct Member {
    machine: StepMachine,
    feeds: VecDeque<Feed>,
    /// The exchange that the machine waits in.
    exchange: Option<Exchange>,
    said: Vec<Placed>,
    /// Number of steps so far.
    steps: u64,
    /// Intent of the rank where the last step began.
    intent: Intent,
    names_samples: bool,
    /// Largest weight of a microbatch: of the step before, and of the step that is under way.
    weights: [u64; 2],
}

impl Member {
    fn new(machine: StepMachine, plan: &Plan, program: &Program) -> Self {
        let mut feeds: VecDeque<Feed> = program.iter().flat_map(|part| feeds(plan, part)).collect();
        feeds.push_back(Feed::Begin { intent: Intent::End, names_samples: false });
        Self {
            machine,
            feeds,
            exchange: None,
            said: Vec::new(),
            steps: 0,
            intent: Intent::End,
            names_samples: false,
            weights: [0; 2],
        }
    }

    /// Goes on to the next exchange, or to the end of the program.
    fn go_on(&mut self) {
        loop {
            while let Some(output) = self.machine.poll() {
                let placed = self.placed(output);
                self.said.push(placed);
                match output {
                    Output::Exchange(exchange) => {
                        self.exchange = Some(exchange);
                        return;
                    }
                    Output::Await(operation) | Output::Follow(operation) => {
                        self.machine.done(operation).expect("it waits for it");
                    }
                    _ => {}
                }
                let is_alone = self.machine.plan().mesh().shard_size() == 1;
                let is_complete =
                    |it: &Operation| is_alone && matches!(it, Operation::ReduceScatter(_));
                if let Some(watched) = self.machine.watching().filter(is_complete) {
                    self.machine.done(watched).expect("it is watched");
                }
            }
            let Some(feed) = self.feeds.pop_front() else { return };
            let is_over = matches!(feed, Feed::Call(_) | Feed::EndMicrobatch)
                && !self.machine.has_microbatch();
            if !is_over {
                self.feed(feed);
            }
        }
    }

    fn feed(&mut self, feed: Feed) {
        let machine = &mut self.machine;
        let fed = match feed {
            Feed::Begin { intent, names_samples } => {
                (self.intent, self.names_samples) = (intent, names_samples);
                self.weights = [self.weights[1], 0];
                machine.begin(Begin { step: self.steps, intent })
            }
            Feed::Microbatch => machine.begin_microbatch(),
            Feed::Call(Call::Need(unit)) => machine.need(unit),
            Feed::Call(Call::Loss) => {
                self.weights[1] = 1;
                machine.loss()
            }
            Feed::Call(Call::Offer(unit)) => machine.offer(unit),
            Feed::EndMicrobatch => machine.end_microbatch(),
            Feed::Finish => machine.finish(),
            Feed::Update => {
                let units = machine.plan().update_order().map(Feed::Updated);
                self.feeds = units.chain(self.feeds.drain(..)).collect();
                Ok(())
            }
            Feed::Updated(unit) => machine.updated(unit),
            Feed::Evaluate(kind) => machine.evaluate(kind),
            Feed::Batch => machine.begin_batch(),
            Feed::EndEvaluation => machine.end_evaluation(),
        };
        fed.unwrap_or_else(|refused| panic!("{feed:?}: {refused}"));
    }

    /// Places an output: in the open microbatch, or behind the last one.
    fn placed(&mut self, output: Output) -> Placed {
        let finished = self.machine.microbatches();
        let microbatch = match output {
            Output::Exchange(Exchange::Microbatch(_) | Exchange::Batch(_) | Exchange::Mean) => {
                finished
            }
            _ if self.machine.has_microbatch() => finished,
            _ => finished.saturating_sub(1),
        };
        let step = self.steps;
        self.steps += u64::from(output == Output::Exchange(Exchange::Statement));
        Placed { step, microbatch, output }
    }
}

fn feeds(plan: &Plan, part: &Part) -> Vec<Feed> {
    match part {
        Part::Step(step) => {
            let microbatches = step.given;
            let input = step.input;
            let intent = Intent::Step { microbatches, input };
            let names_samples = step.samples.is_some();
            let mut feeds = vec![Feed::Begin { intent, names_samples }];
            for calls in &step.microbatches {
                feeds.push(Feed::Microbatch);
                feeds.extend(calls.iter().copied().map(Feed::Call));
                feeds.push(Feed::EndMicrobatch);
            }
            feeds.push(Feed::Finish);
            if plan.divides_state() {
                feeds.push(Feed::Update);
            }
            feeds
        }
        Part::Evaluation(kind, batches) => {
            let mut feeds = vec![Feed::Evaluate(*kind)];
            for units in batches {
                feeds.push(Feed::Batch);
                feeds.extend(units.iter().map(|unit| Feed::Call(Call::Need(*unit))));
                feeds.push(Feed::EndMicrobatch);
            }
            feeds.push(Feed::EndEvaluation);
            feeds
        }
    }
}

/// Returns the conclusion of all ranks from their exchanges.
fn conclusion(plan: &Plan, members: &[Member], said: &[Exchange]) -> Conclusion {
    let meet = || -> ! { panic!("the ranks meet in {said:?}") };
    let alike = |first: &Exchange| said.iter().all(|it| it == first);
    match &said[0] {
        Exchange::Headers if alike(&said[0]) => Conclusion::Headers(headers(members)),
        Exchange::Microbatch(_) | Exchange::Batch(_) => {
            let is_batch = matches!(said[0], Exchange::Batch(_));
            let inputs = said.iter().map(|it| match it {
                Exchange::Microbatch(input) if !is_batch => *input,
                Exchange::Batch(input) if is_batch => *input,
                _ => meet(),
            });
            let supply = Supply::of(inputs);
            match is_batch {
                true => Conclusion::Batches(Batches { supply, gathers_again: false }),
                false => Conclusion::Supply(supply),
            }
        }
        Exchange::Unit { .. } => {
            let uses = said.iter().map(|it| match it {
                Exchange::Unit { says, place } => (*says, *place),
                _ => meet(),
            });
            let declared: Vec<UnitId> = plan.spec().unit_ids().collect();
            let (place, next) = NextUnit::of(&uses.collect::<Vec<(UnitUse, usize)>>(), &declared);
            Conclusion::Unit(place, next)
        }
        Exchange::Interim { .. } => {
            let is_interim = |it: &Exchange| matches!(it, Exchange::Interim { .. });
            if said.iter().all(is_interim) { Conclusion::Overflow(None) } else { meet() }
        }
        first if alike(first) => Conclusion::Agreed,
        _ => meet(),
    }
}

fn headers(members: &[Member]) -> Headers {
    let inputs = members.iter().map(|member| match member.intent {
        Intent::Step { input, .. } => input,
        Intent::End => Input::Exhausted,
    });
    let ending = members.iter().enumerate().filter(|(_, member)| member.intent == Intent::End);
    Headers {
        supply: Supply::of(inputs),
        ending: ending.map(|(rank, _)| Rank::new(rank)).collect(),
        weight_hint: members.iter().map(|member| member.weights[0]).max().unwrap_or(0),
        names_samples: members.iter().any(|member| member.names_samples),
        gathers_again: false,
    }
}
