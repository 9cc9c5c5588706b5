//! The options of a model and of a step, and the pure functions that follow from them: checks,
//! divisors, the text and the digest that ranks compare.
//!
//! An option is a value. This floor reads no file, calls no collective and knows no rank's state.

pub(crate) mod allowed;
pub(crate) mod description;
pub(crate) mod digest;
pub mod divide;
pub(crate) mod objective;
pub(crate) mod placement;
pub(crate) mod precision;

use std::num::NonZeroU64;

use hsdp_comm::ModelName;
use hsdp_sharding::step::{self, MicrobatchWeights, ReductionTime, Rules, Sequences};
pub use hsdp_sharding::step::{Input, Supply, Uneven, UnitOrder};
use hsdp_sharding::{Accumulation, DType, FullCopies, Mesh, PlanOptions, StateOver};
use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::options::objective::Objective;
use crate::options::placement::Placement;
use crate::options::precision::{LossScaling, Precision};

/// The options of a model. They must be the same on all ranks; the ranks compare them.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// The replicate x shard mesh; the product of its sizes is the world's size.
    pub mesh: Mesh,
    /// The name of the model, 1 to 32 bytes without control characters and backquotes. Errors and
    /// flight records show it, and ranks compare it: so ranks that make two equal models in
    /// different orders get an error. Each model of a world has a number in the order in which they
    /// were made, whether it has a name or not.
    pub name: Option<String>,
    /// The place of each rank's part of the model: the host or a device.
    pub placement: Placement,
    /// The dtypes of parameters, gradients and outputs.
    pub precision: Precision,
    /// The collectives that run in every microbatch, and those that run once a step.
    pub accumulation: Accumulation,
    /// The number of units that are gathered ahead of the unit in use.
    pub prefetch: usize,
    /// The copies of a gathered unit: one for each rank, or one for all ranks of a process. One
    /// copy for all ranks needs the memory traffic of one copy, and memory for `2 * prefetch + 2`
    /// units, because ranks may be that far apart; no rank may write to it. Copies for each rank
    /// need memory for `prefetch + 1` units on each rank.
    pub full_copies: FullCopies,
    /// The ranks over which optimizer state, and f32 masters of parameters that are gathered in 16
    /// bits, are divided: those of a shard group, or all. With all, a step reduce-scatters sums
    /// over the replicas in place of an all-reduce, and slices of updated parameters are gathered
    /// over them, while the next step begins.
    pub state: StateOver,
    /// The objective whose gradient a step computes.
    pub objective: Objective,
    /// The factor by which losses are multiplied before the backward pass.
    pub loss_scaling: LossScaling,
    /// The policy for trainable parameters without a gradient.
    pub unused: Unused,
    /// The policy for a step with a NaN or an infinity. Dynamic loss scaling skips the step as long
    /// as its scale can be halved.
    pub non_finite: NonFinite,
    /// The policy for steps in which some ranks have data and others have none.
    pub uneven: Uneven,
    /// The policy for a forward that uses the units in another order than the declared one.
    pub order: UnitOrder,
    /// The number of steps between comparisons of the bits of shards with those of the replicas, and
    /// of buffers with those of all ranks; `None` for no comparison. Of shards that replicas divide
    /// ([`state`](Self::state)) masters in f32 are not compared. A comparison detects silent errors
    /// of memory or arithmetic. It needs one small exchange, and one pass over the shard and the
    /// buffers.
    pub compare_replicas: Option<NonZeroU64>,
}

impl ModelOptions {
    /// Returns the defaults on a mesh: all dtypes f32, one reduce-scatter in each microbatch,
    /// prefetch of one unit, the weighted mean.
    #[must_use]
    pub fn on(mesh: Mesh) -> Self {
        Self {
            mesh,
            name: None,
            placement: Placement::default(),
            precision: Precision::default(),
            accumulation: Accumulation::ReduceScatter,
            prefetch: 1,
            full_copies: FullCopies::default(),
            state: StateOver::default(),
            objective: Objective::default(),
            loss_scaling: LossScaling::default(),
            unused: Unused::default(),
            non_finite: NonFinite::default(),
            uneven: Uneven::default(),
            order: UnitOrder::default(),
            compare_replicas: None,
        }
    }

    pub(crate) fn checked(self) -> Result<Self, Error> {
        if let Some(name) = &self.name
            && ModelName::new(name).is_none()
        {
            let most = ModelName::MOST_BYTES;
            let what = format!(
                "name {name:?}: the name of a model has 1 to {most} bytes, and no control \
                 character or backquote; this one has {} bytes",
                name.len()
            );
            return Err(Error::Options { what });
        }
        self.precision.check()?;
        self.objective.check()?;
        self.loss_scaling.check()?;
        check_uneven(self.uneven, self.objective)?;
        Ok(self)
    }

    /// Returns the part of the options that a [`Plan`](crate::Plan) depends on, for a plan before a
    /// model is made.
    #[must_use]
    pub fn plan_options(&self) -> PlanOptions {
        PlanOptions {
            param_dtype: self.precision.parameters,
            reduce_dtype: self.precision.wire,
            accumulation: self.accumulation,
            prefetch: self.prefetch,
            full_copies: self.full_copies,
            state: self.state,
        }
    }

    /// Returns the rules of the order of steps, besides the plan, for operations in such sequences.
    pub(crate) fn rules(&self, sequences: Sequences) -> Rules {
        Rules {
            sequences,
            order: self.order,
            uneven: self.uneven,
            // Gradients of a unit that has unused parameters may come when the backward is over.
            reductions: match self.unused {
                Unused::Zeros => ReductionTime::AtTheEnd,
                Unused::ErrorInFirstStep | Unused::Warn | Unused::ErrorOnAnyRank => {
                    ReductionTime::InTurn
                }
            },
            weights: match self.objective.is_weighted() {
                true => MicrobatchWeights::Enter,
                false => MicrobatchWeights::Ignored,
            },
            loss_scale: match self.loss_scaling {
                LossScaling::Dynamic(_) => step::LossScale::Dynamic,
                LossScaling::Off | LossScaling::Fixed(_) => step::LossScale::Fixed,
            },
            compare_replicas: self.compare_replicas,
        }
    }

    pub(crate) fn wire(&self) -> DType {
        self.precision.wire
    }
}

/// The policy for a trainable parameter that gets no gradient.
///
/// If the policy lets a step pass, the parameter contributes zeros. If it got no gradient on any
/// rank in the whole step, the optimizer does not change it.
///
/// A gradient of zeros is a gradient: a layer before a head whose weight begins with zeros has one.
/// With candle, a parameter has a gradient on a rank if the graph of the rank's loss leads to it. A
/// collective of a tape that this loss does not depend on takes part in the backward with zeros; a
/// parameter before it, to which the loss leads by no other way, has a gradient only if it is not
/// zeros, as where the loss of another rank depends on the collective. This rule holds in each step
/// with `ErrorOnAnyRank`. With the other policies it holds in the first step, and in later steps of
/// a rank on which it left out zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unused {
    /// The first step of a model fails on all ranks with
    /// [`GradientError::WithoutGradient`](crate::GradientError::WithoutGradient) if parameters got
    /// no gradient on any rank. It names them and the likely causes, and the next step counts as
    /// the first. Later steps may leave parameters without a gradient. Skipped steps, and steps in
    /// which no rank has data, do not count. After a load of a model that was trained before, rank
    /// 0 warns in place of the error.
    #[default]
    ErrorInFirstStep,
    /// Rank 0 warns once of the parameters that `ErrorInFirstStep` refuses. For models whose first
    /// step need not reach all parameters, such as experts without tokens.
    Warn,
    /// Every step passes, without a warning of parameters. Where processes compute on devices, all
    /// units are reduced at the end of a microbatch, for gradients that come then.
    Zeros,
    /// A step fails on all ranks with
    /// [`GradientError::UnusedParameters`](crate::GradientError::UnusedParameters) if parameters
    /// got no gradient on some ranks. It names both. Ranks without items (whose weights in the step
    /// add up to 0) need no gradient, unless the objective is `RankMean`.
    ErrorOnAnyRank,
}

/// The policy for a step whose gradient or loss holds a NaN or an infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinite {
    /// `Step::finish` fails on all ranks with
    /// [`GradientError::NonFinite`](crate::GradientError::NonFinite), which names parameter, rank
    /// and microbatch, or the rank of the loss. No parameter changes.
    #[default]
    Abort,
    /// The optimizer skips the step on all ranks.
    Skip,
}

/// The options of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepOptions {
    /// The number of microbatches of the step, the same on all ranks. With a number, a unit's
    /// all-reduce starts as soon as its last reduce-scatter is done. With `None` all all-reduces
    /// run at the end.
    pub microbatches: Option<usize>,
    /// The approximate weight of a microbatch on this rank. It affects only the size of gradients
    /// on the wire. Without it, this rank's largest weight in the last step counts; in the first
    /// step the ranks exchange the weights of their first microbatches.
    pub weight_hint: Option<u64>,
    /// Whether this rank has data for the step. [`Uneven`] is the policy for ranks that differ.
    pub input: Input,
    /// Whether this rank asks that the step be the last. All ranks learn it from
    /// [`Step::shutdown`](crate::Step::shutdown).
    pub shutdown: Shutdown,
    /// A digest of this rank's samples in the step, if it names them. Two ranks with the same
    /// samples are an error on all ranks,
    /// [`DataError::SameSamples`](crate::DataError::SameSamples). The ranks exchange 8 bytes each
    /// in steps in which a rank names its samples.
    pub samples: Option<Samples>,
}

impl StepOptions {
    /// Returns a step of `count` microbatches.
    #[must_use]
    pub fn microbatches(count: usize) -> Self {
        Self { microbatches: Some(count), ..Self::default() }
    }

    /// Returns a step without a given number of microbatches: it lasts as long as ranks have data,
    /// by the model's [`Uneven`] policy.
    #[must_use]
    pub fn as_many_as_come() -> Self {
        Self::default()
    }

    /// Returns the same options for a rank that has no data for the step.
    #[must_use]
    pub fn without_data(self) -> Self {
        Self { input: Input::Exhausted, ..self }
    }
}

/// The digest of a rank that has named no samples.
pub(crate) const NO_SAMPLES: u64 = 0;

/// A digest of the samples of one rank in a step.
///
/// ```
/// use hsdp::Samples;
///
/// assert_eq!(Samples::of([3, 1, 2]), Samples::of(vec![3, 1, 2]));
/// assert_ne!(Samples::of([3, 1, 2]), Samples::of([1, 2, 3]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Samples(u64);

impl Samples {
    /// Returns the digest of the samples' numbers in the data set, in the order in which the step
    /// uses them. A digest of no samples counts as different from that of every other rank.
    pub fn of(numbers: impl IntoIterator<Item = u64>) -> Self {
        let mut numbers = numbers.into_iter().peekable();
        if numbers.peek().is_none() {
            return Self(NO_SAMPLES);
        }
        let mut hasher = Xxh3::new();
        numbers.for_each(|number| hasher.update(&number.to_le_bytes()));
        Self(hasher.digest().max(NO_SAMPLES + 1))
    }

    pub(crate) fn digest(self) -> u64 {
        self.0
    }
}

/// Refuses a policy that the objective does not allow.
fn check_uneven(policy: Uneven, objective: Objective) -> Result<(), Error> {
    match (policy, objective) {
        (Uneven::ZeroWeight, Objective::RankMean) => Err(Error::Options {
            what:
                "Uneven::ZeroWeight with the objective RankMean: a rank without data has no mean; \
                   use WeightedMean, Sum or Factor"
                    .to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Whether a rank asks that the run end although it has data, after a SIGTERM for example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// The rank does not ask.
    #[default]
    NotAsked,
    /// The rank asks that the step that begins be the last.
    Asked,
}

/// The end of a run, where the next step would begin. The same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndOfRun {
    /// The number of the step that does not take place.
    pub step: u64,
    /// The ranks that still have data, which is not used, and the ranks that have none.
    pub supply: Supply,
}
