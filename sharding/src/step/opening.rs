//! Where a step begins, or a rank ends its run: exchanges of headers.

use super::training::Training;
use super::{Begin, Course, Exchange, Headers, Intent, Output, Refused, State, StepMachine};

/// A step that begins, or the end of a run.
#[derive(Debug)]
pub(super) struct Opening {
    begin: Begin,
    headers: Headers,
    stage: Stage,
}

/// The next exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Headers,
    Samples,
    Replicas,
    /// No exchange is left, and the step begins.
    Begun,
}

impl Opening {
    pub(super) fn new(begin: Begin) -> Self {
        Self { begin, headers: Headers::default(), stage: Stage::Headers }
    }
}

impl StepMachine {
    pub(super) fn begin_next(&mut self) -> Option<Output> {
        let State::Opening(opening) = &mut self.state else { return None };
        let exchange = match opening.stage {
            Stage::Headers => Exchange::Headers,
            Stage::Samples => Exchange::Samples,
            Stage::Replicas => Exchange::Replicas,
            Stage::Begun => {
                self.begin_training();
                return None;
            }
        };
        Some(Output::Exchange(exchange))
    }

    fn begin_training(&mut self) {
        let State::Opening(opening) = std::mem::replace(&mut self.state, State::Between) else {
            return;
        };
        if let Intent::Step { microbatches, .. } = opening.begin.intent {
            let weights = self.rules.weights;
            let training = Training::new(&self.plan, weights, microbatches, opening.headers);
            self.state = State::Step(Box::new(training));
        }
    }

    /// Takes the headers of all ranks.
    pub(super) fn take_headers(&mut self, headers: Headers) -> Result<(), Refused> {
        let State::Opening(opening) = &mut self.state else { return Ok(()) };
        let names_samples = headers.names_samples;
        opening.headers = headers;
        if names_samples {
            opening.stage = Stage::Samples;
            return Ok(());
        }
        self.decide_course()
    }

    /// Notes that samples or replicas do not differ as they must not.
    pub(super) fn take_comparison(&mut self, exchange: Exchange) -> Result<(), Refused> {
        if exchange == Exchange::Samples {
            return self.decide_course();
        }
        if let State::Opening(opening) = &mut self.state {
            opening.stage = Stage::Begun;
        }
        Ok(())
    }

    fn decide_course(&mut self) -> Result<(), Refused> {
        let State::Opening(opening) = &mut self.state else { return Ok(()) };
        let Headers { supply, ending, .. } = &opening.headers;
        let refused = match supply.course(self.rules.uneven) {
            Some(Course::Ends) => {
                self.state = State::Between;
                return Ok(());
            }
            // A rank that ends its run takes no part in steps of other ranks, not even without
            // data.
            _ if !ending.is_empty() => {
                Refused::UnevenEnds { ending: ending.clone(), ready: supply.ready.clone() }
            }
            Some(Course::Goes) => {
                let compares = self.rules.compares_replicas(opening.begin.step);
                opening.stage = if compares { Stage::Replicas } else { Stage::Begun };
                return Ok(());
            }
            None => Refused::UnevenInputs { microbatch: None, supply: supply.clone() },
        };
        self.state = State::Between;
        Err(refused)
    }
}
