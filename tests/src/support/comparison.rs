//! Engines beside the machines of their steps, on the same programs.

use std::sync::Arc;

use hsdp::{
    Accumulation, Error, Event, ModelOptions, ModelSpec, Objective, ShardedModel, Uneven, World,
};
use hsdp_comm::Channel;
use hsdp_sharding::step::{Output, Sequences};
use hsdp_sharding::{Plan, Rank};

use crate::support::events::word;
use crate::support::flights::{self, Flight, by_channel, difference_of, first_difference};
use crate::support::machines::{self, Placed};
use crate::support::programs::{self, Call, Part, Program};

/// A model, the programs of its ranks, and what the machines say to them.
#[derive(Debug)]
pub struct Comparison<'a> {
    spec: &'a ModelSpec,
    options: &'a ModelOptions,
    plan: Arc<Plan>,
    sequences: Sequences,
    /// Programs by rank.
    pub programs: Vec<Program>,
    /// Outputs of their machines, by rank.
    pub said: Vec<Vec<Placed>>,
}

/// Operations and events of an engine, and the norms of its gradients.
#[derive(Debug)]
pub struct Ran {
    flights: Vec<Flight>,
    events: Vec<Event>,
    norms: Vec<f64>,
}

impl<'a> Comparison<'a> {
    /// Runs the machines.
    ///
    /// # Panics
    /// If the programs do not keep to the order of a step.
    #[must_use]
    pub fn new(
        spec: &'a ModelSpec,
        options: &'a ModelOptions,
        programs: Vec<Program>,
        sequences: Sequences,
    ) -> Self {
        let plan = Plan::new(spec.clone(), options.mesh, options.plan_options());
        let plan = Arc::new(plan.expect("a plan"));
        let said = machines::outputs(&plan, machines::rules(options, sequences), &programs);
        Self { spec, options, plan, sequences, programs, said }
    }

    /// Runs the engine of a rank.
    ///
    /// # Errors
    /// The error of the runtime.
    pub fn run(&self, world: &World) -> Result<Ran, Error> {
        let spec = self.spec.clone();
        let options = self.options.clone();
        let mut model = ShardedModel::new(world.clone(), spec, options, programs::initial)?;
        model.record_events();
        let norms = programs::run(&mut model, &self.programs[world.rank().index()])?;
        let flights = flights::of_model(&world.flight_record());
        Ok(Ran { flights, events: model.take_events(), norms })
    }

    /// Returns the first difference between the engine of a rank and its machine.
    #[must_use]
    pub fn difference(&self, rank: Rank, ran: Ran) -> Option<String> {
        let said = &self.said[rank.index()];
        let expected = flights::expected(&self.plan, rank, said);
        let operations = match self.sequences {
            Sequences::OfEachChannel => None,
            Sequences::One => difference_of(&of_units(&ran.flights), &of_units(&expected)),
        };
        operations
            .or_else(|| first_difference(&by_channel(ran.flights), &by_channel(expected)))
            .or_else(|| match self.has_events_in_order() {
                true => difference_of(&self.told(&ran.events), &self.words(said)),
                false => None,
            })
            .or_else(|| first_norm(&ran.norms, &self.norms()))
    }

    /// Returns whether events of different channels have one order: gathers that are issued ahead
    /// may wait for slices, until these are complete.
    fn has_events_in_order(&self) -> bool {
        self.sequences == Sequences::One || !self.plan.divides_state()
    }

    /// Returns whether all-reduces begin at any time of the backward: when reduce-scatters over
    /// several ranks are complete.
    fn all_reduces_at_any_time(&self) -> bool {
        self.sequences == Sequences::OfEachChannel
            && self.options.mesh.shard_size() > 1
            && self.options.accumulation != Accumulation::Every
    }

    /// Returns the words of an engine's events, each with its microbatch.
    fn told(&self, events: &[Event]) -> Vec<(usize, String)> {
        let leaves_out = |event: &&Event| {
            self.all_reduces_at_any_time() && matches!(event, Event::AllReduce { .. })
        };
        events.iter().filter(|event| !leaves_out(event)).map(word).collect()
    }

    /// Returns the words of outputs that are events of an engine, too.
    fn words(&self, said: &[Placed]) -> Vec<(usize, String)> {
        let has_event = |placed: &&Placed| match placed.output {
            Output::Gather { .. } | Output::Hand { .. } | Output::ReduceScatter { .. } => true,
            Output::AllReduce(_) => !self.all_reduces_at_any_time(),
            Output::ScatterSums(_) | Output::GatherSlices(_) => true,
            _ => false,
        };
        let word = |placed: &Placed| (placed.microbatch, placed.output.to_string());
        said.iter().filter(has_event).map(word).collect()
    }

    /// Returns the norms of the steps' gradients, by the programs alone.
    fn norms(&self) -> Vec<f64> {
        let step = |part: &'_ Part| match part {
            Part::Step(step) => Some(step.microbatches.clone()),
            Part::Evaluation(..) => None,
        };
        let steps = |program: &Program| program.iter().filter_map(step).collect();
        let steps: Vec<Vec<Vec<Vec<Call>>>> = self.programs.iter().map(steps).collect();
        let norm = |number: usize| {
            let least = steps.iter().map(|rank| rank[number].len()).min().unwrap_or(0);
            // The first rank without data may end the step.
            let ends = self.options.uneven == Uneven::Stop;
            let count = if ends { least } else { usize::MAX };
            let step = || steps.iter().map(|rank| &rank[number][..count.min(rank[number].len())]);
            let losses = step().flatten().flatten().filter(|call| **call == Call::Loss).count();
            let divisor = match self.options.objective {
                Objective::WeightedMean => losses as f64,
                Objective::RankMean => steps.len() as f64,
                _ => 1.0,
            };
            programs::norm_of_sum(self.spec, step()) / divisor
        };
        (0..steps[0].len()).map(norm).collect()
    }
}

/// Returns the operations of gathers, reductions and all-reduces.
fn of_units(flights: &[Flight]) -> Vec<&Flight> {
    flights.iter().filter(|flight| flight.channel != Channel::Control).collect()
}

/// Returns the norms, if one is not near the expected one.
fn first_norm(found: &[f64], expected: &[f64]) -> Option<String> {
    let differs = |(found, expected): (&f64, &f64)| (found - expected).abs() > 1e-5 * expected;
    let is_near = found.len() == expected.len() && !found.iter().zip(expected).any(differs);
    (!is_near).then(|| format!("norms {found:?}, expected {expected:?}"))
}
