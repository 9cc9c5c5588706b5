//! Training runs with each optimizer, and their traces.

use std::collections::BTreeMap;

use hsdp::checkpoint::Checkpointed;
use hsdp::{
    Adafactor, AdafactorOptions, AdamW, AdamWOptions, Ema, Error, Gradients, Lion, LionOptions,
    ModelOptions, ModelSpec, Muon, MuonOptions, Optimizer, Param, Sgd, SgdOptions, ShardedModel,
    StepOptions, Unit, Update, Whole, WholeParameters, World,
};
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs::{self, Batch};

/// Returns units of odd shapes: with frozen parameters, whole rows, and fewer elements than ranks.
pub(crate) fn spec() -> ModelSpec {
    let mixed = Unit::new("mixed")
        .param(Param::new("mixed.weight", [37, 19]))
        .param(Param::new("mixed.table", [211]).frozen())
        .param(Param::new("mixed.scale", [1]));
    let rows = Unit::new("rows").param(Param::new("rows.weight", [40, 50]).rows(8));
    ModelSpec::new()
        .unit(layer("first", [13, 7]))
        .unit(mixed)
        .unit(Unit::new("still").param(Param::new("still.weight", [5, 9]).frozen()))
        .unit(rows)
}

/// Returns units that are cut between blocks of 256 elements.
fn in_blocks() -> ModelSpec {
    let blocks = |name: &str, shape: [usize; 2]| Param::new(name, shape).blocks(256);
    let mixed =
        Unit::new("mixed").param(blocks("mixed.a", [37, 19])).param(blocks("mixed.b", [4, 5]));
    let still = Unit::new("still").param(Param::new("still.weight", [5, 9]).frozen());
    ModelSpec::new()
        .unit(Unit::new("first").param(blocks("first", [61, 50])))
        .unit(mixed)
        .unit(still)
}

/// An optimizer of a test.
pub(crate) struct Recipe<O> {
    pub(crate) name: &'static str,
    pub(crate) spec: fn() -> ModelSpec,
    /// Values that a parameter starts from.
    pub(crate) initial: fn(&Param) -> Vec<f32>,
    pub(crate) make: fn(&ShardedModel) -> O,
    pub(crate) update: fn(&mut O, &mut ShardedModel, Gradients) -> Result<Update, Error>,
}

/// Returns values that no dtype of 16 bits has.
pub(crate) fn initial(param: &Param) -> Vec<f32> {
    springs::initial(param).into_iter().map(|value| value / 3.0).collect()
}

/// Defines the recipe of an optimizer that updates all parameters.
macro_rules! recipe {
    ($name:ident, $spec:expr, $optimizer:ty, |$model:ident| $make:expr) => {
        pub(crate) fn $name() -> Recipe<$optimizer> {
            Recipe {
                name: stringify!($name),
                spec: $spec,
                initial,
                make: |$model| $make,
                update: |optimizer, model, gradients| optimizer.step(model, gradients),
            }
        }
    };
}

const ADAMW: AdamWOptions =
    AdamWOptions { learning_rate: 0.05, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };

recipe!(adamw, spec, AdamW, |model| AdamW::new(model, ADAMW));
recipe!(eight_bit, in_blocks, AdamW, |model| AdamW::with_eight_bit_state(model, ADAMW));
recipe!(sgd, spec, Sgd, |model| {
    Sgd::new(model, SgdOptions { learning_rate: 0.02, momentum: 0.9, ..SgdOptions::default() })
});
recipe!(lion, spec, Lion, |model| {
    Lion::new(model, LionOptions { learning_rate: 0.01, ..LionOptions::default() })
});
recipe!(adafactor, spec, Adafactor, |model| Adafactor::new(model, AdafactorOptions::default()));

/// Returns the recipe of Muon for matrices, with AdamW for the others.
pub(crate) fn muon() -> Recipe<(Muon, AdamW)> {
    Recipe {
        name: "muon",
        spec,
        initial,
        make: |model| (Muon::new(model, MuonOptions::default()), AdamW::new(model, ADAMW)),
        update: |(muon, adamw), model, gradients| {
            let is_matrix = |param: &Param| param.as_matrices().is_some();
            model.update_by(gradients, [(muon, &is_matrix), (adamw, &|it| !is_matrix(it))])
        },
    }
}

/// Returns the recipe of an update of whole parameters, with state on their owners.
pub(crate) fn owned() -> Recipe<WholeParameters> {
    Recipe {
        name: "owned",
        spec,
        initial,
        make: |model| WholeParameters::new(model, "normed", |param| param.shape.len()),
        update: |held, model, gradients| {
            let update = |Whole { values, gradient, state, .. }: Whole<'_>| {
                let norm = gradient.iter().map(|it| it * it).sum::<f32>().sqrt().max(1e-12);
                let pairs = values.iter_mut().zip(gradient);
                pairs.for_each(|(value, it)| *value -= 0.01 * it / norm);
                state[0] += norm;
            };
            held.by(update).step(model, gradients)
        },
    }
}

/// What a step ends with on all ranks. Floats are compared by their bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trace {
    pub(crate) loss: u64,
    pub(crate) norm: u64,
    pub(crate) norms: Vec<(String, u64)>,
    pub(crate) is_applied: bool,
    pub(crate) gradients: BTreeMap<String, Vec<u32>>,
    pub(crate) parameters: BTreeMap<String, Vec<u32>>,
    pub(crate) averages: BTreeMap<String, Vec<u32>>,
}

/// A rank's part of a run.
pub(crate) struct Training<'a, O> {
    recipe: &'a Recipe<O>,
    pub(crate) model: ShardedModel,
    pub(crate) state: (O, Ema),
}

impl<'a, O: Checkpointed> Training<'a, O> {
    pub(crate) fn new(
        world: World,
        recipe: &'a Recipe<O>,
        options: &ModelOptions,
    ) -> Result<Self, Error> {
        let spec = (recipe.spec)();
        let model = ShardedModel::new(world, spec, options.clone(), recipe.initial)?;
        let state = ((recipe.make)(&model), Ema::new(&model, 0.9)?);
        Ok(Self { recipe, model, state })
    }

    /// Runs the microbatches of a step.
    pub(crate) fn gradients(&mut self) -> Result<Gradients, Error> {
        let rank = self.model.rank().index();
        let number = self.model.committed_steps();
        let mut step = self.model.begin_step(StepOptions::microbatches(2))?;
        for microbatch in 0..2 {
            springs::microbatch(&mut step, Batch::of(rank, number, microbatch))?;
        }
        step.finish()
    }

    /// Makes a step without reading anything between.
    pub(crate) fn step(&mut self) -> Result<Update, Error> {
        let gradients = self.gradients()?;
        self.update(gradients)
    }

    /// Clips the gradients, and updates the model.
    pub(crate) fn update(&mut self, gradients: Gradients) -> Result<Update, Error> {
        self.update_unclipped(gradients.clip(3.0))
    }

    /// Updates the model by gradients as they are.
    pub(crate) fn update_unclipped(&mut self, gradients: Gradients) -> Result<Update, Error> {
        (self.recipe.update)(&mut self.state.0, &mut self.model, gradients)
    }

    /// Makes a step, and returns what it ends with.
    pub(crate) fn traced_step(&mut self) -> Result<Trace, Error> {
        let gradients = self.gradients()?;
        self.traced(gradients)
    }

    /// Updates the model, and returns what the step ends with.
    pub(crate) fn traced(&mut self, gradients: Gradients) -> Result<Trace, Error> {
        let [loss, norm] = [gradients.loss(), gradients.norm()].map(f64::to_bits);
        let full = bits(gradients.full(&self.model)?);
        let norms = gradients.norms(&self.model)?;
        let norms = norms.iter().map(|(name, norm)| (name.to_owned(), norm.to_bits())).collect();
        let is_applied = self.update(gradients)? == Update::Applied;
        let parameters = bits(self.model.full_parameters()?);
        let averages = self.model.with_shards(&self.state.1, |model| model.full_parameters())?;
        let averages = bits(averages);
        Ok(Trace { loss, norm, norms, is_applied, gradients: full, parameters, averages })
    }

    /// Makes steps, and returns what each ends with.
    pub(crate) fn train(&mut self, steps: usize) -> Result<Vec<Trace>, Error> {
        (0..steps).map(|_| self.traced_step()).collect()
    }
}

fn bits(tensors: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<u32>> {
    let of = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    tensors.into_iter().map(|(name, values)| (name, of(values))).collect()
}
