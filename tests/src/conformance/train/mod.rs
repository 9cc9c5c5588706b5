//! Kind `train`: a GPT trained for some steps.

mod read;
mod run;

use std::collections::BTreeMap;

use hsdp::{AdamWOptions, DType, Mesh};
use hsdp_models::gpt::GptConfig;

/// A case of kind `train`.
#[derive(Debug)]
pub struct TrainCase {
    name: String,
    mesh: Mesh,
    model: GptConfig,
    steps: usize,
    microbatches: usize,
    /// Sequences a microbatch and rank.
    batch: usize,
    param_dtype: DType,
    reduce_dtype: DType,
    adamw: AdamWOptions,
    max_norm: f64,
    /// [steps, microbatches, ranks, batch, context + 1].
    tokens: Vec<u32>,
    initial: BTreeMap<String, Vec<f32>>,
    expected: Expected,
}

/// The results of the unsharded model in f64.
#[derive(Debug)]
struct Expected {
    /// Of each step.
    loss: Vec<f64>,
    /// Of each step, before clipping.
    grad_norm: Vec<f64>,
    /// The parameters at the end, where they are compared.
    parameters: Option<BTreeMap<String, Vec<f32>>>,
}

/// How far a run may be off, relative to the expected values.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    loss: f64,
    grad_norm: f64,
    /// Of each final tensor, norm over norm; `None` where they are not compared.
    parameters: Option<f64>,
}

impl TrainCase {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many ranks it needs.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.mesh.world_size()
    }

    /// The same sequences in other hands: on `mesh`, in so many microbatches of a step.
    ///
    /// The mean over all of a step's sequences is the same, so the same is expected.
    ///
    /// # Panics
    /// If the step's sequences cannot be dealt out evenly.
    #[must_use]
    pub fn regrouped(self, mesh: Mesh, microbatches: usize) -> Self {
        let sequences = self.microbatches * self.mesh.world_size() * self.batch;
        let hands = microbatches * mesh.world_size();
        assert!(sequences.is_multiple_of(hands), "{sequences} sequences over {hands}");
        let name = format!("{} on {mesh} in {microbatches} microbatches", self.name);
        Self { name, mesh, microbatches, batch: sequences / hands, ..self }
    }

    /// The bounds of f32, or those of everything that is coarser.
    fn bounds(&self) -> Bounds {
        match (self.param_dtype, self.reduce_dtype) {
            (DType::F32, DType::F32) => {
                Bounds { loss: 3e-6, grad_norm: 1e-5, parameters: Some(2e-5) }
            }
            _ => Bounds { loss: 5e-3, grad_norm: 5e-2, parameters: None },
        }
    }
}
