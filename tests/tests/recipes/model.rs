//! A model with matrices, stacks of matrices and vectors, whose gradients are whole numbers that a
//! test knows, and its optimizers.

use std::collections::{BTreeMap, BTreeSet};

use hsdp::checkpoint::Checkpointed;
use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, Error, Gradients, Lion, LionOptions, LossSum,
    ModelOptions, ModelSpec, MomentumKind, Muon, MuonOptions, Optimizer, Param, Sgd, SgdOptions,
    ShardedModel, State, Step, StepOptions, Unit, Update, Values, Whole, WholeParameters, World,
};
use hsdp_tests::support::handmade::{self, Handmade};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

use crate::shampoo;

/// All elements of a model by name.
pub(crate) type Tensors = BTreeMap<String, Vec<f32>>;

/// The meshes on which recipes run.
pub(crate) const MESHES: [[usize; 2]; 5] = [[1, 1], [1, 4], [2, 2], [4, 1], [2, 3]];

/// Microbatches of a step over all ranks. Each mesh has the same ones.
const MICROBATCHES: usize = 12;

/// Steps of a run.
pub(crate) const STEPS: usize = 4;

/// Two units, declared for the optimizers of a recipe.
pub(crate) fn spec(recipe: Recipe) -> ModelSpec {
    let first = Unit::new("first")
        .param(recipe.declared(Param::new("first.weight", [40, 24])))
        .param(recipe.declared(Param::new("first.bias", [40])))
        .param(recipe.declared(Param::new("first.conv", [8, 3, 3, 3]).matrices(1, 8, 27)));
    let second = Unit::new("second")
        .param(recipe.declared(Param::new("second.norm", [530])))
        .param(Param::new("second.table", [70]).frozen())
        .param(recipe.declared(Param::new("second.experts", [3, 16, 8]).matrices(3, 16, 8)))
        .param(recipe.declared(Param::new("second.weight", [16, 64])));
    ModelSpec::new().unit(first).unit(second).updated_by(|param| recipe.state(param))
}

/// A recipe of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipe {
    Sgd,
    AdamW,
    AdamW8Bit,
    Lion,
    Adafactor,
    /// Muon for matrices, AdamW for the rest.
    Muon,
    /// An optimizer of a user's own for whole parameters.
    Shampoo,
    /// Three that exchange data: Muon for the matrices of the first unit, Adafactor for those of
    /// the second, and an update of whole parameters for vectors, one of which has no state.
    Mixed,
}

impl Recipe {
    pub(crate) const ALL: [Self; 8] = [
        Self::Sgd,
        Self::AdamW,
        Self::AdamW8Bit,
        Self::Lion,
        Self::Adafactor,
        Self::Muon,
        Self::Shampoo,
        Self::Mixed,
    ];

    fn declared(self, param: Param) -> Param {
        if self == Self::AdamW8Bit { param.blocks(256) } else { param }
    }

    fn state(self, param: &Param) -> State {
        match self {
            Self::Sgd | Self::Lion => State::Elements(1),
            Self::AdamW => State::Elements(2),
            Self::AdamW8Bit => State::EightBit { block: 256 },
            Self::Adafactor => State::Factored,
            Self::Muon if is_matrix(param) => State::Muon,
            Self::Muon => State::Elements(2),
            Self::Shampoo => State::Owned(shampoo::state(param)),
            Self::Mixed if is_first_matrix(param) => State::Muon,
            Self::Mixed if is_second_matrix(param) => State::Factored,
            Self::Mixed => State::Owned(counters(param)),
        }
    }
}

/// Whether Muon has a parameter.
pub(crate) fn is_matrix(param: &Param) -> bool {
    param.as_matrices().is_some()
}

pub(crate) fn is_first_matrix(param: &Param) -> bool {
    is_matrix(param) && param.name.starts_with("first")
}

pub(crate) fn is_second_matrix(param: &Param) -> bool {
    is_matrix(param) && param.name.starts_with("second")
}

/// The elements of state of a vector.
fn counters(param: &Param) -> usize {
    usize::from(param.name == "second.norm")
}

/// A step down the gradient, which the state counts.
fn descend(Whole { values, gradient, state, .. }: Whole<'_>) {
    values.iter_mut().zip(gradient).for_each(|(value, slope)| *value -= 0.01 * slope);
    state.iter_mut().for_each(|count| *count += 1.0);
}

/// The options of each optimizer.
pub(crate) const ADAMW: AdamWOptions =
    AdamWOptions { learning_rate: 0.01, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };
pub(crate) const SGD: SgdOptions = SgdOptions {
    learning_rate: 0.01,
    momentum: 0.9,
    momentum_kind: MomentumKind::Nesterov,
    weight_decay: 0.1,
};
pub(crate) const LION: LionOptions =
    LionOptions { learning_rate: 0.01, betas: (0.9, 0.99), weight_decay: 0.1 };

pub(crate) fn adafactor() -> AdafactorOptions {
    AdafactorOptions { weight_decay: 0.1, ..AdafactorOptions::default() }
}

pub(crate) fn muon() -> MuonOptions {
    MuonOptions { learning_rate: 0.02, ..MuonOptions::default() }
}

/// The part of a test that works with the optimizers of a recipe.
pub(crate) trait Act<T> {
    fn act<O: Steps + Checkpointed>(self, model: ShardedModel, optimizers: O) -> Result<T, Error>;
}

/// An update by one optimizer, or by several.
pub(crate) trait Steps {
    fn apply(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error>;
}

macro_rules! alone {
    ($($optimizer:ty),*) => { $(
        impl Steps for $optimizer {
            fn apply(
                &mut self,
                model: &mut ShardedModel,
                gradients: Gradients,
            ) -> Result<Update, Error> {
                self.step(model, gradients)
            }
        }
    )* };
}

alone!(Sgd, AdamW, Lion, Adafactor, Muon);

impl Steps for (Muon, AdamW) {
    fn apply(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        let (muon, adamw) = self;
        let spec = model.plan().spec().clone();
        let matrices: BTreeSet<&str> =
            spec.params().filter(|(_, it)| is_matrix(it)).map(|(_, it)| &*it.name).collect();
        let is_ours = |param: &Param| matrices.contains(&*param.name);
        model.update_by(gradients, [(muon, &is_ours), (adamw, &|it| !is_ours(it))])
    }
}

impl Steps for ((Muon, WholeParameters), Adafactor) {
    fn apply(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        let ((muon, whole), adafactor) = self;
        let mut whole = whole.by(descend);
        let is_vector = |param: &Param| !is_matrix(param);
        model.update_by(
            gradients,
            [(muon, &is_first_matrix), (&mut whole, &is_vector), (adafactor, &is_second_matrix)],
        )
    }
}

impl Steps for WholeParameters {
    fn apply(&mut self, model: &mut ShardedModel, gradients: Gradients) -> Result<Update, Error> {
        self.by(shampoo::update).step(model, gradients)
    }
}

/// Makes the model and the optimizers of a recipe on this rank, and acts with them.
pub(crate) fn with<T>(
    world: World,
    options: ModelOptions,
    recipe: Recipe,
    act: impl Act<T>,
) -> Result<T, Error> {
    let model = ShardedModel::new(world, spec(recipe), options, springs::initial)?;
    match recipe {
        Recipe::Sgd => {
            let sgd = Sgd::new(&model, SGD);
            act.act(model, sgd)
        }
        Recipe::AdamW => {
            let adamw = AdamW::new(&model, ADAMW);
            act.act(model, adamw)
        }
        Recipe::AdamW8Bit => {
            let adamw = AdamW::with_eight_bit_state(&model, ADAMW);
            act.act(model, adamw)
        }
        Recipe::Lion => {
            let lion = Lion::new(&model, LION);
            act.act(model, lion)
        }
        Recipe::Adafactor => {
            let adafactor = Adafactor::new(&model, adafactor());
            act.act(model, adafactor)
        }
        Recipe::Muon => {
            let both = (Muon::new(&model, muon()), AdamW::new(&model, ADAMW));
            act.act(model, both)
        }
        Recipe::Shampoo => {
            let shampoo = WholeParameters::new(&model, "shampoo", shampoo::state);
            act.act(model, shampoo)
        }
        Recipe::Mixed => {
            let whole = WholeParameters::new(&model, "descent", counters);
            let muon = Muon::new(&model, muon());
            let adafactor = Adafactor::new(&model, adafactor());
            act.act(model, ((muon, whole), adafactor))
        }
    }
}

/// The gradient of an element: a whole number, so that sums are exact, and no pattern that a matrix
/// product would cancel.
fn slope(param: &Param, index: usize, step: usize, microbatch: usize) -> f32 {
    let seed = param.name.len() * 131 + index * 7919 + step * 104_729 + microbatch * 15_485_863;
    let mixed = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let number = (mixed % 33) as f32;
    number - 16.0
}

struct Numbers {
    step: usize,
    microbatch: usize,
    unit: f32,
}

impl Handmade for Numbers {
    fn forward(&mut self, _: &Param, _: Values<'_>) {}

    fn loss(&self) -> LossSum {
        LossSum::new(0.0, 1)
    }

    fn derivative(&self, param: &Param, values: Values<'_>) -> Option<Vec<f32>> {
        let of = |index| self.unit * slope(param, index, self.step, self.microbatch);
        Some((0..values.len()).map(of).collect())
    }
}

/// The gradients of a step: those of twelve microbatches, whatever the mesh.
pub(crate) fn gradients(model: &mut ShardedModel, number: usize) -> Result<Gradients, Error> {
    gradients_in(1.0, model, number)
}

/// The same, times `unit`.
fn gradients_in(unit: f32, model: &mut ShardedModel, number: usize) -> Result<Gradients, Error> {
    let ranks = model.plan().mesh().world_size();
    let own = MICROBATCHES / ranks;
    let first = model.rank().index() * own;
    let mut step: Step<'_> = model.begin_step(StepOptions::microbatches(own))?;
    for microbatch in first..first + own {
        handmade::microbatch(&mut step, &mut Numbers { step: number, microbatch, unit })?;
    }
    step.finish()
}

/// The parameters after each step, and the gradients that were applied.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trace {
    pub(crate) gradients: Tensors,
    pub(crate) parameters: Tensors,
}

/// Trains by gradients of whole numbers, times this unit.
struct Train(f32);

impl Act<Vec<Trace>> for Train {
    fn act<O: Steps + Checkpointed>(
        self,
        mut model: ShardedModel,
        mut optimizers: O,
    ) -> Result<Vec<Trace>, Error> {
        let step = |number| {
            let gradients = gradients_in(self.0, &mut model, number)?.clip(40.0);
            let told = gradients.full(&model)?;
            let factor = gradients.clip_factor();
            let clipped = told.into_iter().map(|(name, values)| {
                (name, values.into_iter().map(|value| value * factor).collect())
            });
            let clipped: Tensors = clipped.collect();
            optimizers.apply(&mut model, gradients)?;
            Ok(Trace { gradients: clipped, parameters: model.full_parameters()? })
        };
        (0..STEPS).map(step).collect()
    }
}

/// A run of a recipe on a mesh: the same on all ranks.
pub(crate) fn run(recipe: Recipe, sizes: [usize; 2]) -> Vec<Trace> {
    run_in(1.0, recipe, sizes)
}

/// A run whose gradients are whole numbers, times `unit`.
pub(crate) fn run_in(unit: f32, recipe: Recipe, sizes: [usize; 2]) -> Vec<Trace> {
    let options = ModelOptions::on(mesh(sizes[0], sizes[1]));
    let ranks = options.mesh.world_size();
    common(on_ranks(ranks, |world| with(world, options.clone(), recipe, Train(unit))))
}

/// A run of [`Recipe::Muon`] with these options of Muon.
pub(crate) fn run_muon(options: MuonOptions, sizes: [usize; 2]) -> Vec<Trace> {
    let mesh = mesh(sizes[0], sizes[1]);
    common(on_ranks(mesh.world_size(), |world| {
        let spec = spec(Recipe::Muon);
        let model = ShardedModel::new(world, spec, ModelOptions::on(mesh), springs::initial)?;
        let both = (Muon::new(&model, options), AdamW::new(&model, ADAMW));
        Train(1.0).act(model, both)
    }))
}

/// The parameters before the first step.
pub(crate) fn initial(recipe: Recipe) -> Tensors {
    let spec = spec(recipe);
    let params = spec.params();
    params.map(|(_, param)| (param.name.clone(), springs::initial(param))).collect()
}
