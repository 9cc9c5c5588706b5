//! Options that determine a plan, shared by every command that plans.

use clap::{Args, ValueEnum};
use hsdp_kernels::EIGHT_BIT_BLOCK;
use hsdp_models::decoder::DecoderConfig;
use hsdp_sharding::{
    Accumulation, DType, Mesh, ModelSpec, Offload, Param, Plan, PlanOptions, State, StateOver,
};
use hsdp_train::number::count;

use super::PlanDevice;
use crate::model::{Adapters, Model};

/// Maximum number of ranks in a mesh. The traffic is computed for each replica.
const MAX_RANKS: usize = 1 << 20;

/// Maximum number of microbatches in a step, for which byte counts fit 64 bits.
const MAX_MICROBATCHES: u64 = 1 << 20;

/// Options of a plan.
#[derive(Args, Debug)]
pub(crate) struct Choices {
    /// Folder of transformers or its config.json, or another file that describes a model (PLAN.md),
    /// of at most 16 MiB; or gpt2-small, llama3-8b or llama3-70b
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,

    /// Train adapters of this rank on the projections of attention, and freeze the model, a decoder
    /// of transformers; off by default
    #[arg(long, value_name = "RANK", value_parser = count::<1, { DecoderConfig::MAX_SIZE }>)]
    pub(crate) lora: Option<usize>,

    /// Replicas x shards, such as 2x64; at most 1048576 ranks
    #[arg(long, value_name = "RxS")]
    pub(crate) mesh: Mesh,

    /// Dtype of gathered parameters, in which the model computes: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    pub(crate) param_dtype: DType,

    /// Dtype of gradients on the wire: f32, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = DType::of_training)]
    pub(crate) reduce_dtype: DType,

    /// Collectives on gradients in each microbatch: reduce-scatter, every (also all-reduce) or
    /// local (none before the last)
    #[arg(long, value_name = "MODE", default_value = "reduce-scatter")]
    pub(crate) accumulation: Accumulation,

    /// Microbatches of a step, on each rank; at most 1048576
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_MICROBATCHES))]
    pub(crate) microbatches: u64,

    /// Units that are gathered ahead
    #[arg(long, value_name = "UNITS", default_value_t = 1)]
    pub(crate) prefetch: usize,

    /// Optimizer whose state takes memory, and whose update may exchange matrices
    #[arg(long, value_name = "OPTIMIZER", default_value = "adamw")]
    pub(crate) optimizer: PlannedOptimizer,

    /// Ranks over which masters and optimizer state are divided: shards (each replica has all of
    /// it) or world (each replica updates a slice of its shards)
    #[arg(long, value_name = "RANKS", default_value = "shards")]
    pub(crate) state_over: StateOver,

    /// Part of a model on a device that is kept in host memory: none, optimizer (its state) or all
    /// (also shards)
    #[arg(long, value_name = "PART", default_value = "none")]
    pub(crate) offload: Offload,
}

impl Choices {
    /// Checks that a device can hold and update the model in this way.
    ///
    /// # Errors
    /// A text with the first choice that does not fit.
    pub(crate) fn check(&self, device: PlanDevice) -> Result<(), String> {
        let Self { offload, optimizer, .. } = self;
        if device == PlanDevice::Cpu && *offload != Offload::None {
            return Err(format!(
                "--offload {offload} needs --device cuda: there is nothing to offload from the host"
            ));
        }
        let is_on_device = device == PlanDevice::Cuda && *offload == Offload::None;
        if is_on_device && !optimizer.updates_on_device() {
            let optimizer = optimizer.name();
            return Err(format!(
                "--optimizer {optimizer} does not update a model on a device: add --offload optimizer"
            ));
        }
        Ok(())
    }

    /// Finds the model. In host memory, frozen parameters have only 16 bits if parameters are
    /// gathered in 16 bits.
    ///
    /// # Errors
    /// The errors of [`Model::find`].
    pub(crate) fn model(&self, device: PlanDevice) -> Result<Model, String> {
        let is_stored = device == PlanDevice::Cpu && self.param_dtype != DType::F32;
        let frozen_in = is_stored.then_some(self.param_dtype);
        let adapters = self.lora.map(|rank| Adapters { rank, frozen_in });
        Model::find(&self.model, adapters)
    }

    /// Plans the model.
    ///
    /// # Errors
    /// A text, if the model cannot be planned.
    pub(crate) fn plan(&self, model: &Model) -> Result<Plan, String> {
        let mesh = self.mesh;
        let ranks = self.mesh.world_size();
        if ranks > MAX_RANKS {
            return Err(format!("mesh {mesh} has {ranks} ranks; at most {MAX_RANKS} are planned"));
        }
        let options = PlanOptions {
            param_dtype: self.param_dtype,
            reduce_dtype: self.reduce_dtype,
            accumulation: self.accumulation,
            prefetch: self.prefetch,
            state: self.state_over,
            ..PlanOptions::default()
        };
        let spec = self.optimizer.applied_to(&model.spec);
        let plan = Plan::new(spec, mesh, options);
        let plan = plan.map_err(|wrong| format!("{}: {wrong}", self.model))?;
        check_bytes(&plan, self.microbatches)?;
        Ok(plan)
    }
}

/// Checks that byte counts fit 64 bits. In each microbatch a rank receives at most two gathers, a
/// reduction and the two halves of an all-reduce, of at most 4 bytes per element. In the update it
/// receives updated slices, and matrices once there and once back; or the two halves of an
/// all-reduce of one f64 for each parameter, row and column, and of one for each parameter: at most
/// four per element.
fn check_bytes(plan: &Plan, microbatches: u64) -> Result<(), String> {
    let elements: u64 = plan.layouts().iter().map(|layout| layout.full_len() as u64).sum();
    let ranks = plan.mesh().world_size();
    let of_update = 1 + 2 + 2 * (3 + 1) * 2;
    let times = 5 * u128::from(microbatches) + of_update;
    let bytes = u128::from(elements) * 4 * times * ranks as u128;
    if u64::try_from(bytes).is_ok() {
        return Ok(());
    }
    Err(format!(
        "{elements} elements, {microbatches} microbatches and {ranks} ranks: the bytes of a step do not fit 64 bits"
    ))
}

/// An optimizer, which determines the state of each trained parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlannedOptimizer {
    /// Two f32 of state for each trained element.
    #[default]
    Adamw,
    /// No state.
    Sgd,
    /// SGD with momentum: one f32 of state for each trained element.
    Momentum,
    /// One f32 of state for each trained element.
    Lion,
    /// One f32 for each row and each column of the trained matrices.
    Adafactor,
    /// `AdamW` with two bytes of state for each trained element, and two f32 for each block of 256.
    Adamw8bit,
    /// Muon for matrices other than embeddings and heads, `AdamW` for all others.
    Muon,
}

/// Parts of the names of embeddings and heads, which Muon leaves to `AdamW`.
const TABLES: [&str; 4] = ["embed", "wte", "wpe", "lm_head"];

impl PlannedOptimizer {
    /// Returns the name on a command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no optimizer is hidden");
        value.get_name().to_owned()
    }

    /// Returns whether it updates a model on a device there. The others need its state on the host.
    pub(crate) const fn updates_on_device(self) -> bool {
        !matches!(self, Self::Adafactor | Self::Adamw8bit)
    }

    /// Returns the model with the state of this optimizer. 8-bit state cuts parameters only between
    /// blocks.
    pub(crate) fn applied_to(self, spec: &ModelSpec) -> ModelSpec {
        let spec = match self {
            Self::Adamw8bit => spec.clone().in_blocks(EIGHT_BIT_BLOCK),
            _ => spec.clone(),
        };
        spec.updated_by(|param| self.state(param))
    }

    fn state(self, param: &Param) -> State {
        match self {
            Self::Sgd => State::Elements(0),
            Self::Momentum | Self::Lion => State::Elements(1),
            Self::Adafactor => State::Factored,
            Self::Adamw8bit => State::EightBit { block: EIGHT_BIT_BLOCK },
            Self::Muon if is_updated_whole(param) => State::Muon,
            Self::Adamw | Self::Muon => State::Elements(2),
        }
    }
}

fn is_updated_whole(param: &Param) -> bool {
    let is_table = TABLES.iter().any(|table| param.name.contains(table));
    param.as_matrices().is_some() && !is_table
}
