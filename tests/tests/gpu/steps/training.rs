//! A model of all kinds of parameters, and its training by gradients that are made by hand.

use std::collections::BTreeMap;
use std::sync::Arc;

use hsdp::{
    AdamW, AdamWOptions, Error, Full, GradientValues, Gradients, HostBuffer, Lion, LionOptions,
    LossSum, ModelOptions, ModelSpec, MomentumKind, Norms, Optimizer, Param, ParamId, Pass,
    Placement, Sgd, SgdOptions, ShardedModel, StepOptions, Unit, UnitId, Update, World,
};
use hsdp_comm::LedgerSnapshot;
use hsdp_kernels::cast;
use hsdp_kernels::cuda::Stream;
use hsdp_sharding::Role;
use hsdp_tests::support::handmade::in_f32;
use hsdp_tests::support::models::layer;
use hsdp_tests::support::springs;

use super::super::numbers::ordinary;
use super::super::{stream, upload};

/// Microbatches of each step.
const MICROBATCHES: usize = 3;

/// Units with a frozen parameter between others, with one of whole rows, frozen as a whole, kept
/// from forward to backward, and larger than a block of threads takes.
pub(super) fn spec() -> ModelSpec {
    let mixed = Unit::new("mixed")
        .param(Param::new("mixed.weight", [37, 19]))
        .param(Param::new("mixed.table", [211]).frozen())
        .param(Param::new("mixed.scale", [1]));
    let rows = Unit::new("rows")
        .param(Param::new("rows.weight", [40, 50]).rows(8))
        .param(Param::new("rows.bias", [40]));
    ModelSpec::new()
        .unit(layer("first", [13, 7]))
        .unit(mixed)
        .unit(Unit::new("still").param(Param::new("still.weight", [5, 9]).frozen()))
        .unit(rows.keep())
        .unit(layer("wide", [90, 100]))
}

/// Where gradients are made.
#[derive(Clone, Copy, Debug)]
struct At {
    rank: usize,
    step: u64,
    microbatch: usize,
}

impl At {
    /// Whether a parameter gets a gradient: some get none in some microbatches, on some ranks, or
    /// in a whole step.
    fn has_gradient(self, param: &Param) -> bool {
        let Self { rank, step, microbatch } = self;
        match param.name.as_str() {
            _ if param.role == Role::Frozen => false,
            "first.bias" => step != 1,
            "mixed.scale" => (rank + microbatch).is_multiple_of(2),
            "rows.bias" => (rank, microbatch) == (0, 0),
            _ => true,
        }
    }

    /// Whether it hands the gradients of a unit in.
    fn reduces(self, unit: &Unit) -> bool {
        let Self { rank, microbatch, .. } = self;
        unit.is_trainable() && !(unit.name == "wide" && (rank, microbatch) == (1, 1))
    }

    /// A number of its own for each parameter.
    fn seed(self, ParamId { unit, index }: ParamId) -> u64 {
        let Self { rank, step, microbatch } = self;
        let places = [rank, microbatch, unit.index(), index];
        places.into_iter().fold(step, |seed, place| seed * 16 + place as u64)
    }
}

/// Which optimizer trains.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trainer {
    /// SGD with this momentum.
    Sgd(f64, MomentumKind),
    AdamW,
    Lion,
}

impl Trainer {
    /// Of two groups: matrices have another weight decay and another rate.
    pub(super) fn of(self, model: &ShardedModel) -> Box<dyn Optimizer> {
        let learning_rate = 0.05;
        let weight_decay = 0.01;
        let is_matrix = |param: &Param| param.shape.len() >= 2;
        match self {
            Self::Sgd(momentum, momentum_kind) => {
                let options = SgdOptions { learning_rate, momentum, momentum_kind, weight_decay };
                let sgd = Sgd::new(model, options);
                let changed = |it| SgdOptions { learning_rate: 0.03, weight_decay: 0.1, ..it };
                Box::new(sgd.group(is_matrix, changed))
            }
            Self::AdamW => {
                let defaults = AdamWOptions::default();
                let adamw = AdamW::new(model, AdamWOptions { learning_rate, ..defaults });
                let changed = |it| AdamWOptions { learning_rate: 0.03, weight_decay: 0.1, ..it };
                Box::new(adamw.group(is_matrix, changed))
            }
            Self::Lion => {
                let lion = LionOptions { learning_rate, ..LionOptions::default() };
                let changed = |it| LionOptions { learning_rate: 0.03, weight_decay: 0.1, ..it };
                Box::new(Lion::new(model, lion).group(is_matrix, changed))
            }
        }
    }
}

/// A rank's part of the model, and where its gradients are made.
pub(super) struct Training {
    pub(super) model: ShardedModel,
    trainer: Box<dyn Optimizer>,
    begin: StepOptions,
    /// Where the model lies on a device.
    stream: Option<Stream>,
    step: u64,
}

/// State of a rank after training.
pub(super) struct Trained {
    pub(super) parameters: BTreeMap<String, Vec<f32>>,
    /// Of the last step.
    pub(super) gradient: BTreeMap<String, Vec<f32>>,
    /// By step.
    pub(super) norms: Vec<f64>,
    pub(super) losses: Vec<f64>,
    pub(super) moved: LedgerSnapshot,
}

impl Training {
    pub(super) fn new(
        world: World,
        options: &ModelOptions,
        trainer: Trainer,
        begin: StepOptions,
    ) -> Result<Self, Error> {
        Self::with(world, spec(), options, trainer, begin)
    }

    /// The same, of another model.
    pub(super) fn with(
        world: World,
        spec: ModelSpec,
        options: &ModelOptions,
        trainer: Trainer,
        begin: StepOptions,
    ) -> Result<Self, Error> {
        let stream = (options.placement != Placement::Host).then(stream);
        let model = springs::model_of(world, &spec, options)?;
        let trainer = trainer.of(&model);
        Ok(Self { model, trainer, begin, stream, step: 0 })
    }

    /// Trains some steps.
    pub(super) fn train(mut self, steps: usize) -> Result<Trained, Error> {
        let before = self.model.world().ledger();
        let mut norms = Vec::new();
        let mut losses = Vec::new();
        let mut gradient = BTreeMap::new();
        for _ in 0..steps {
            let gradients = self.gradients()?;
            norms.push(gradients.norm());
            losses.push(gradients.loss());
            gradient = gradients.full(&self.model)?;
            self.trainer.step(&mut self.model, gradients)?;
        }
        let parameters = self.model.full_parameters()?;
        let moved = self.model.world().ledger().since(&before);
        Ok(Trained { parameters, gradient, norms, losses, moved })
    }

    /// Trains some steps, and looks at nothing.
    pub(super) fn run(&mut self, steps: usize) -> Result<(), Error> {
        for _ in 0..steps {
            let gradients = self.gradients()?;
            self.trainer.step(&mut self.model, gradients)?;
        }
        Ok(())
    }

    pub(super) fn update(&mut self, gradients: Gradients) -> Result<Update, Error> {
        self.trainer.step(&mut self.model, gradients)
    }

    /// Updates by these gradients. How far that moves the parameters, if the update is on the host.
    pub(super) fn ratios(&mut self, gradients: Gradients) -> Result<Option<Norms>, Error> {
        let on_host = !self.model.updates_on_device();
        self.update(if on_host { gradients.measured() } else { gradients })?;
        self.model.last_update().map(|update| update.ratios(&self.model)).transpose()
    }

    pub(super) fn gradients(&mut self) -> Result<Gradients, Error> {
        let rank = self.model.rank().index();
        let step = self.step;
        self.step += 1;
        let mut open = self.model.begin_step(self.begin)?;
        for microbatch in 0..MICROBATCHES {
            pass(open.microbatch()?, At { rank, step, microbatch }, self.stream.as_ref())?;
        }
        open.finish()
    }
}

/// One microbatch: what it hands in depends on the parameters that it gathers, so that a bit which
/// differs spreads.
fn pass(mut pass: Pass<'_>, at: At, stream: Option<&Stream>) -> Result<(), Error> {
    let handle = pass.handle();
    let spec = handle.plan().spec();
    let mut kept: Vec<Option<Full>> = Vec::new();
    let mut loss = 0.0;
    for id in spec.unit_ids() {
        let full = pass.unshard(id)?;
        loss += full.values(0).to_f32().into_iter().map(f64::from).sum::<f64>();
        kept.push((spec[id].name == "rows").then_some(full));
    }
    let weight = 1 + (at.rank + at.microbatch) as u64 % 3;
    let seed = in_f32(pass.loss(LossSum::new(loss, weight))?.value());
    for id in spec.unit_ids().rev() {
        let full = match kept[id.index()].take() {
            Some(full) => full,
            None => pass.unshard(id)?,
        };
        let params = spec[id].params.iter().enumerate();
        let gradients = params.map(|(index, param)| {
            let gradient = gradient(&full, id, index, at, seed);
            at.has_gradient(param).then(|| lent(gradient, stream.filter(|_| at.lies_there(index))))
        });
        let gradients = gradients.collect();
        drop(full);
        if at.reduces(&spec[id]) {
            pass.reduce(id, gradients)?;
        }
    }
    pass.finish()
}

impl At {
    /// Whether a gradient of a model on a device lies there: every second one, in turns.
    fn lies_there(self, index: usize) -> bool {
        (self.rank + self.microbatch + index).is_multiple_of(2)
    }
}

/// In the compute dtype, as a backward makes it.
fn gradient(full: &Full, unit: UnitId, index: usize, at: At, seed: f32) -> HostBuffer {
    let values = full.values(index);
    let noise = ordinary(at.seed(ParamId { unit, index }), values.len());
    let elements = values.to_f32().into_iter().zip(noise);
    let elements: Vec<f32> = elements.map(|(value, noise)| (value / 4.0 + noise) * seed).collect();
    let mut rounded = HostBuffer::zeros(values.dtype(), values.len()).expect("memory");
    cast(rounded.values_mut(), &elements);
    rounded
}

/// A gradient as the runtime takes it: on the stream's device, or on the host.
fn lent(gradient: HostBuffer, stream: Option<&Stream>) -> Arc<dyn GradientValues> {
    match stream {
        Some(stream) => Arc::new(upload(stream, gradient.values())),
        None => Arc::new(gradient),
    }
}
