//! A small convolutional net with batch norm: two convolutions, a linear layer, each with a batch
//! norm and a ReLU, and a head.
//!
//! A folder has `init.safetensors` and `final.safetensors` (parameters and running statistics
//! before and after), `batches.safetensors` (`images` `[steps, batch, 1, side, side]` in f32,
//! `labels` `[steps, batch]` in u32, `eval_images` and `eval_labels` without steps), and
//! `expected.json` (recipe, losses, gradient norms, held-out losses). Names are those of a PyTorch
//! `state_dict`.
//!
//! The ranks divide each batch, and the statistics are those of the whole batch.
//!
//! One parameter is not determined by the recipe: a batch norm follows `fc.bias` and subtracts it
//! again, so its gradient is 0 in exact numbers. Rounding alone moves it, and AdamW makes a step of
//! the size of the learning rate even of a gradient of 1e-8. Two runs by one program on two machines
//! differ there. `bn3.running_mean` follows the bias, and held-out losses depend on the difference
//! of the two. So the held-out loss at the end is that of the net with both tensors of the golden
//! run, and `bn3.running_mean` itself is compared up to the steps that the bias can make.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, IndexOp as _, Result as CandleResult, Tensor, safetensors};
use candle_nn::loss::cross_entropy;
use hsdp::{Uneven, WorldOptions};
use hsdp_candle::ForwardMode;
use hsdp_candle::prelude::*;
use hsdp_models::nn::{self, BatchNormOptions};
use hsdp_train::{Failure, threads};
use serde::Deserialize;

/// The bias that a batch norm subtracts again, and the running mean that follows it.
const UNDETERMINED: [&str; 2] = ["fc.bias", "bn3.running_mean"];

/// A golden run.
#[derive(Debug)]
pub struct GoldenRun {
    init: BTreeMap<String, Tensor>,
    finished: BTreeMap<String, Tensor>,
    batches: BTreeMap<String, Tensor>,
    expected: Expected,
}

/// The recipe and the results of a run.
#[derive(Debug, Deserialize)]
struct Expected {
    sizes: Sizes,
    recipe: Recipe,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    eval_loss_before: f64,
    eval_loss_after: f64,
}

#[derive(Debug, Deserialize)]
struct Sizes {
    momentum: f64,
    eps: f64,
}

#[derive(Debug, Deserialize)]
struct Recipe {
    optimizer: String,
    learning_rate: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    clip: f64,
    steps: usize,
}

/// Way in which the convolutions run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// The graph keeps the tensors of each unit.
    Kept,
    /// The backward runs each unit again.
    Recomputed,
}

/// Results of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Loss of each step, before its update.
    pub losses: Vec<f64>,
    /// Norm of the gradient of each step, before the clip.
    pub norms: Vec<f64>,
    /// Held-out losses before the first step and after the last.
    pub held_out: [f64; 2],
    /// Parameters and running statistics after the last step, by name.
    pub tensors: BTreeMap<String, Vec<f32>>,
}

impl GoldenRun {
    /// Reads the folder of a run.
    ///
    /// # Errors
    /// [`Failure::Input`] if a file is missing or broken, or the recipe is another than AdamW.
    pub fn read(folder: &Path) -> Result<Self, Failure> {
        let tensors = |name: &str| -> Result<BTreeMap<String, Tensor>, Failure> {
            let path = folder.join(name);
            let tensors: HashMap<_, _> = safetensors::load(&path, &Device::Cpu)
                .map_err(|error| Failure::input(format!("{}: {error}", path.display())))?;
            Ok(tensors.into_iter().collect())
        };
        let path: PathBuf = folder.join("expected.json");
        let refused =
            |problem: &dyn fmt::Display| Failure::input(format!("{}: {problem}", path.display()));
        let text = hsdp_train::file::read_text(&path, 1 << 24).map_err(|error| refused(&error))?;
        let expected: Expected = serde_json::from_str(&text).map_err(|error| refused(&error))?;
        let Recipe { optimizer, steps, .. } = &expected.recipe;
        if optimizer != "adamw" {
            return Err(refused(&format_args!("optimizer {optimizer}, and adamw is known")));
        }
        for (what, numbers) in [("losses", &expected.losses), ("grad_norms", &expected.grad_norms)]
        {
            if numbers.len() != *steps {
                let numbers = numbers.len();
                return Err(refused(&format_args!("{numbers} {what} of {steps} steps")));
            }
        }
        let run = Self {
            init: tensors("init.safetensors")?,
            finished: tensors("final.safetensors")?,
            batches: tensors("batches.safetensors")?,
            expected,
        };
        for name in ["images", "labels", "eval_images", "eval_labels"] {
            run.batch(name)?;
        }
        Ok(run)
    }

    fn batch(&self, name: &str) -> Result<&Tensor, Failure> {
        let missing = || Failure::input(format!("batches.safetensors has no tensor {name}"));
        self.batches.get(name).ok_or_else(missing)
    }

    /// Returns the units of the net, with the shapes of the initial values.
    fn spec(&self) -> Result<ModelSpec, Failure> {
        let shape = |name: &str| match self.init.get(name) {
            Some(tensor) => Ok(tensor.dims().to_vec()),
            None => Err(Failure::input(format!("init.safetensors has no tensor {name}"))),
        };
        let param = |name: &str| Ok::<_, Failure>(Param::new(name, shape(name)?));
        let norm = |unit: Unit, name: &str| {
            let channels = shape(&format!("{name}.weight"))?.iter().product();
            Ok::<_, Failure>(unit.batch_norm(name, channels))
        };
        let first = Unit::new("conv1").param(param("conv1.weight")?);
        let second = Unit::new("conv2").param(param("conv2.weight")?);
        let linear = Unit::new("fc").param(param("fc.weight")?).param(param("fc.bias")?);
        let head = Unit::new("head").param(param("head.weight")?).param(param("head.bias")?);
        Ok(ModelSpec::new()
            .unit(norm(first, "bn1")?)
            .unit(norm(second, "bn2")?)
            .unit(norm(linear, "bn3")?)
            .unit(head))
    }

    fn forward(
        &self,
        units: &dyn Units,
        images: &Tensor,
        activations: Activations,
    ) -> CandleResult<Tensor> {
        let Sizes { eps, momentum } = self.expected.sizes;
        let options = BatchNormOptions { eps, momentum };
        let block = |unit: &'static str, norm: &'static str, stride: usize, x: &Tensor| {
            let forward = move |p: &dyn Parameters, x: &Tensor| {
                let x = match unit {
                    "fc" => nn::linear(x, &p.get("fc.weight")?, Some(&p.get("fc.bias")?))?,
                    _ => x.conv2d(&p.get(&format!("{unit}.weight"))?, 1, stride, 1, 1)?,
                };
                nn::batch_norm(p, norm, &x, options)?.relu()
            };
            match activations {
                Activations::Kept => units.unit(unit, x, forward),
                Activations::Recomputed => units.recomputed(unit, x, forward),
            }
        };
        let x = block("conv1", "bn1", 1, images)?;
        let x = block("conv2", "bn2", 2, &x)?.flatten_from(1)?;
        let x = block("fc", "bn3", 1, &x)?;
        units.unit("head", &x, |p, x| {
            nn::linear(x, &p.get("head.weight")?, Some(&p.get("head.bias")?))
        })
    }

    /// Trains on a mesh whose ranks are threads.
    ///
    /// # Errors
    /// The first failure of a rank.
    pub fn train(&self, mesh: Mesh, activations: Activations) -> Result<Outcome, Failure> {
        let outcomes = threads::run(mesh.world_size(), WorldOptions::default(), |world| {
            self.train_rank(world, mesh, activations)
        })?;
        let mut outcomes = outcomes.into_iter();
        let first = outcomes.next().expect("a mesh has a rank");
        match outcomes.all(|other| other == first) {
            true => Ok(first),
            false => Err(Failure::Disagreement("ranks have different results".to_owned())),
        }
    }

    fn train_rank(
        &self,
        world: World,
        mesh: Mesh,
        activations: Activations,
    ) -> Result<Outcome, Failure> {
        let options = ModelOptions { uneven: Uneven::ZeroWeight, ..ModelOptions::on(mesh) };
        let values = |param: &Param| {
            let tensor = self.init.get(&param.name).and_then(|it| it.flatten_all().ok());
            tensor.and_then(|it| it.to_vec1().ok()).unwrap_or_default()
        };
        let Recipe { learning_rate, betas, eps, weight_decay, clip, steps, .. } =
            self.expected.recipe;
        let adamw = AdamWOptions { learning_rate, betas, eps, weight_decay };
        let mut model = ShardedModel::new(world, self.spec()?, options, values)?;
        let mut adamw = AdamW::new(&model, adamw);
        let before = self.held_out(&mut model, activations)?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let images = self.batch("images")?.i(step)?;
            let labels = self.batch("labels")?.i(step)?;
            let part = own_part(&model, &images, &labels)?;
            let options = StepOptions::microbatches(1);
            let options = if part.is_some() { options } else { options.without_data() };
            let mut step = model.begin_step(options)?;
            if let Some((images, labels)) = part {
                let pass = Pass::new(step.microbatch()?)?;
                let logits = self.forward(&pass, &images, activations)?;
                let loss = cross_entropy(&logits, &labels)?;
                pass.backward(&loss, labels.dim(0)? as u64)?;
            }
            let gradients = step.finish()?;
            losses.push(gradients.loss());
            norms.push(gradients.norm());
            adamw.step(&mut model, gradients.clip(clip))?;
        }
        let after = self.held_out(&mut model, activations)?;
        Ok(Outcome { losses, norms, held_out: [before, after], tensors: model.full_parameters()? })
    }

    /// Returns the mean loss of the held-out items, by the running statistics.
    fn held_out(&self, model: &mut ShardedModel, activations: Activations) -> Result<f64, Failure> {
        let part = own_part(model, self.batch("eval_images")?, self.batch("eval_labels")?)?;
        let mut evaluation = model.evaluation()?;
        let (mut sum, mut items) = (0.0, 0);
        if let Some((images, labels)) = part {
            let pass = Pass::new(evaluation.batch()?)?;
            let logits = self.forward(&pass, &images, activations)?;
            items = labels.dim(0)?;
            sum = cross_entropy(&logits, &labels)?.to_scalar::<f32>()?;
            pass.finish()?;
        }
        Ok(evaluation.mean(f64::from(sum) * items as f64, items as u64)?)
    }
}

/// This rank's part of a batch: as many items as the others have, or one less. `None` if it has no
/// item.
fn own_part(
    model: &ShardedModel,
    images: &Tensor,
    labels: &Tensor,
) -> CandleResult<Option<(Tensor, Tensor)>> {
    let (rank, ranks) = (model.world().rank().index(), model.world().size());
    let items = labels.dim(0)?;
    let begin = rank * items / ranks;
    let len = (rank + 1) * items / ranks - begin;
    if len == 0 {
        return Ok(None);
    }
    let labels = labels.narrow(0, begin, len)?.to_dtype(DType::U32)?;
    Ok(Some((images.narrow(0, begin, len)?, labels)))
}

/// Kind of numbers that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// Losses of the steps.
    Losses,
    /// Norms of the gradients.
    Norms,
    /// Held-out losses.
    HeldOut,
    /// Held-out loss at the end, by the ranks and by one process with their parameters.
    Evaluation,
    /// Running statistics, but for those of the next kind.
    RunningStatistics,
    /// Running mean that follows a bias which rounding moves.
    MeanBehindBias,
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Losses => "losses",
            Self::Norms => "gradient norms",
            Self::HeldOut => "held-out losses",
            Self::Evaluation => "held-out loss by ranks and by one process",
            Self::RunningStatistics => "running statistics",
            Self::MeanBehindBias => "running mean behind a bias that rounding moves",
        })
    }
}

/// The largest difference of a kind of numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Kind of the numbers.
    pub compared: Compared,
    /// Place of the difference: a step, a time or a tensor.
    pub place: String,
    /// Number of the sharded run.
    pub got: f64,
    /// Number of the golden run.
    pub want: f64,
    /// Largest difference that rounding explains.
    pub bound: f64,
}

impl Difference {
    /// Returns the difference as a part of its bound.
    #[must_use]
    pub fn of_bound(&self) -> f64 {
        let apart = (self.got - self.want).abs() / self.bound;
        if apart.is_nan() { f64::INFINITY } else { apart }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compared, place, got, want, bound } = self;
        let apart = (got - want).abs();
        write!(f, "{compared}: {apart:.1e} of {bound:.0e} at {place}: {got:.7}, expected {want:.7}")
    }
}

impl GoldenRun {
    /// Returns the largest difference of each kind between a run and the golden one.
    ///
    /// # Errors
    /// [`Failure::Input`] if the golden run lacks a tensor that the net has; errors of candle.
    pub fn differences(&self, outcome: &Outcome) -> Result<Vec<Difference>, Failure> {
        let Expected { losses, grad_norms, eval_loss_before, eval_loss_after, .. } = &self.expected;
        let difference = |compared, place: String, got, want| {
            let bound = self.bound(compared);
            Difference { compared, place, got, want, bound }
        };
        let steps = |compared, got: &[f64], want: &[f64]| {
            let pairs = got.iter().copied().zip(want.iter().copied()).enumerate();
            pairs
                .map(|(step, (got, want))| difference(compared, format!("step {step}"), got, want))
                .collect::<Vec<_>>()
        };
        let [before, after] = outcome.held_out;
        let whole = self.held_out_of(&outcome.tensors)?;
        let mut shifted = outcome.tensors.clone();
        for name in UNDETERMINED {
            shifted.insert(name.to_owned(), self.finished(name)?);
        }
        let determined = self.held_out_of(&shifted)?;
        let begin = || "the begin".to_owned();
        let end = || "the end".to_owned();
        let (mut running, mut behind_bias) = (Vec::new(), Vec::new());
        for (_, buffer) in self.spec()?.buffers() {
            let (compared, differences) = match UNDETERMINED.contains(&buffer.name.as_str()) {
                true => (Compared::MeanBehindBias, &mut behind_bias),
                false => (Compared::RunningStatistics, &mut running),
            };
            let pairs = outcome.tensors[&buffer.name].iter().zip(self.finished(&buffer.name)?);
            differences.extend(pairs.enumerate().map(|(channel, (got, want))| {
                let place = format!("{}[{channel}]", buffer.name);
                difference(compared, place, f64::from(*got), f64::from(want))
            }));
        }
        let kinds = [
            steps(Compared::Losses, &outcome.losses, losses),
            steps(Compared::Norms, &outcome.norms, grad_norms),
            vec![
                difference(Compared::HeldOut, begin(), before, *eval_loss_before),
                difference(Compared::HeldOut, end(), determined, *eval_loss_after),
            ],
            vec![difference(Compared::Evaluation, end(), after, whole)],
            running,
            behind_bias,
        ];
        let worst = |of: Vec<Difference>| {
            of.into_iter().max_by(|a, b| a.of_bound().total_cmp(&b.of_bound()))
        };
        Ok(kinds.into_iter().filter_map(worst).collect())
    }

    /// Returns the largest difference of numbers near 1 that rounding explains.
    fn bound(&self, compared: Compared) -> f64 {
        match compared {
            Compared::Losses | Compared::HeldOut => 2e-5,
            Compared::Evaluation => 1e-6,
            Compared::Norms => 1e-4,
            Compared::RunningStatistics => 1e-5,
            Compared::MeanBehindBias => {
                // In k steps each of two runs moves the bias by about k learning rates at most.
                let Recipe { learning_rate, steps, .. } = self.expected.recipe;
                let momentum = self.expected.sizes.momentum;
                let follow = |mean: f64, step: usize| {
                    (1.0 - momentum) * mean + momentum * 2.0 * learning_rate * step as f64
                };
                (0..steps).fold(0.0, follow)
            }
        }
    }

    /// Returns a tensor of the golden run after its last step.
    fn finished(&self, name: &str) -> Result<Vec<f32>, Failure> {
        match self.finished.get(name) {
            Some(tensor) => Ok(tensor.flatten_all()?.to_vec1()?),
            None => Err(Failure::input(format!("final.safetensors has no tensor {name}"))),
        }
    }

    /// Returns the held-out loss of the net with these parameters and running statistics, in one
    /// process without shards.
    fn held_out_of(&self, tensors: &BTreeMap<String, Vec<f32>>) -> Result<f64, Failure> {
        let net = Plain::new(self.spec()?, tensors, Precision::default())?;
        let net = net.in_mode(ForwardMode::Evaluation);
        let logits = self.forward(&net, self.batch("eval_images")?, Activations::Kept)?;
        let labels = self.batch("eval_labels")?.to_dtype(DType::U32)?;
        Ok(f64::from(cross_entropy(&logits, &labels)?.to_scalar::<f32>()?))
    }
}
