//! A rank's whole work.

use candle_core::{DType, Tensor};
use hsdp::Channel;
use hsdp::dist::{OnShard, Sum};
use hsdp::prelude::*;
use hsdp_candle::Error;
use hsdp_candle::distributed::{Functions as _, Pairs as _, Tape, gradient_of};
use hsdp_train::Failure;
use parking_lot::Mutex;

use super::data::{Pairs, partners};
use super::failure::TrainError;
use super::model::{Contrast, Copied, Own, Parameters, tower};
use super::options::Options;
use super::report::{Progress, Record};
use super::sgd::Sgd;
use super::verify::{Verified, Verifier};

/// The results of a training run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) records: Vec<Record>,
    pub(crate) verified: Option<Verified>,
}

/// The state that only rank 0 has.
#[derive(Debug)]
struct Observer {
    progress: Progress,
    verifier: Option<Verifier>,
}

/// Trains on as many threads as there are ranks.
pub(crate) fn train(options: &Options, progress: Progress) -> Result<Run, Failure> {
    let verifier = options.verify.then(|| Verifier::new(options)).transpose()?;
    let observer = Mutex::new(Some(Observer { progress, verifier }));
    let outcomes = hsdp::launch(options.ranks, WorldOptions::default(), |world| {
        let observer = if world.rank().index() == 0 { observer.lock().take() } else { None };
        Rank::new(world, options)?.train(observer)
    });
    let mut observer = None;
    let mut failures = Vec::new();
    for outcome in outcomes {
        match outcome.map_err(TrainError::from).and_then(|outcome| outcome) {
            Ok(found) => observer = observer.or(found),
            Err(failure) => failures.push(failure),
        }
    }
    // The original failure comes before those that only echo it.
    failures.sort_by_key(TrainError::is_echo);
    if let Some(first) = failures.into_iter().next() {
        return Err(first.into());
    }
    let Observer { progress, verifier } =
        observer.ok_or_else(|| Failure::work("rank 0 has kept no records"))?;
    Ok(Run { records: progress.finish(), verified: verifier.map(Verifier::verified) })
}

/// The state of one rank in training.
#[derive(Debug)]
struct Rank<'a> {
    world: World,
    options: &'a Options,
    parameters: Parameters,
    sgd: Sgd,
}

impl<'a> Rank<'a> {
    fn new(world: World, options: &'a Options) -> Result<Self, TrainError> {
        let (parameters, sgd) = (Parameters::new(options)?, Sgd::default());
        Ok(Self { world, options, parameters, sgd })
    }

    fn train(mut self, mut observer: Option<Observer>) -> Result<Option<Observer>, TrainError> {
        for step in 0..self.options.steps {
            let record = self.step(step)?;
            let Some(Observer { progress, verifier }) = &mut observer else { continue };
            if let Some(verifier) = verifier {
                verifier.check(&record, &self.parameters)?;
            }
            progress.add(record);
        }
        Ok(observer)
    }

    fn step(&mut self, step: usize) -> Result<Record, Error> {
        let (rank, share) = (self.world.rank().index(), self.options.share());
        let tape = Tape::of_group(&self.world, self.world.world_group(Channel::User))?;
        let views = Pairs::of_rank(self.options, step, rank)?.views;
        let views: [Own; 2] = views.map(|view| tape.assume(view));
        let parameters: [Copied; 4] = self
            .parameters
            .0
            .each_ref()
            .map(|parameter| tape.assume(parameter.as_tensor().clone()));
        let [a, b, c, d] = &parameters;
        let [one, other] = [tower(&views[0], [a, b])?, tower(&views[1], [c, d])?];

        let places: Own = tape.assume(partners(rank * share, share)?);
        let there = Contrast::new(&one, &other, &places)?;
        let back = Contrast::new(&other, &one, &places)?;
        let pairs = 2.0 * self.options.batch as f64;
        let loss = there.loss.add(&back.loss)?.scale(1.0 / pairs)?.to_partial(OnShard)?;
        let gradients = loss.backward()?;

        let gradient = |parameter: &Copied| -> Result<Tensor, Error> {
            let term = gradient_of(&gradients, parameter)?;
            Ok(term.all_reduce(OnShard, Sum)?.into_tensor().detach())
        };
        let gradients = [gradient(a)?, gradient(b)?, gradient(c)?, gradient(d)?];
        self.sgd.step(&self.parameters, gradients)?;

        let whole = |value: &Own| -> Result<Tensor, Error> {
            let terms: Own = tape.without_gradients().assume(value.tensor().detach());
            let sum: Copied = terms.to_partial(OnShard)?.all_reduce(OnShard, Sum)?;
            Ok(sum.into_tensor().to_dtype(DType::F64)?)
        };
        let found = whole(&there.found.add(&back.found)?)?.to_scalar::<f64>()?;
        let loss = whole(&there.loss.add(&back.loss)?.scale(1.0 / pairs)?)?.to_scalar::<f64>()?;
        Ok(Record { step, loss, accuracy: found / pairs })
    }
}
