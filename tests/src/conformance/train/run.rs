//! Running a case: all steps on every rank, then the comparison.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use hsdp::{
    AdamW, DType, LossScaling, ModelOptions, Optimizer as _, Placement, Precision, Rank,
    ShardedModel, StepOptions, World,
};
use hsdp_candle::Pass;
use hsdp_models::gpt::Gpt;
use serde::{Deserialize, Serialize};

use super::TrainCase;
use crate::conformance::compare::{Tally, first_difference};
use crate::conformance::ranks::{Site, on_ranks};
use crate::conformance::{Verdict, ledger};

/// The scale of losses where gradients or the wire are f16: a power of two, which comes out again
/// exactly.
const F16_LOSS_SCALE: f64 = 1024.0;

/// The results of one rank after the last step.
#[derive(Serialize, Deserialize)]
struct Trained {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    parameters: BTreeMap<String, Vec<f32>>,
    ledger: Result<(), String>,
}

impl TrainCase {
    /// Runs it, with a thread for each rank.
    #[must_use]
    pub fn run(&self) -> Verdict {
        self.run_on(Site::default())
    }

    /// Runs it, with a thread for each rank, there.
    #[must_use]
    pub fn run_on(&self, site: Site) -> Verdict {
        self.try_run(site).unwrap_or_else(Verdict::Failed)
    }

    fn try_run(&self, site: Site) -> Result<Verdict, String> {
        let trained =
            on_ranks(self.mesh, site.carrier, |world| self.run_rank(world, site.placement))?;
        self.check_agreement(&trained)?;
        for (rank, trained) in self.mesh.ranks().zip(&trained) {
            trained.ledger.as_ref().map_err(|what| format!("rank {rank}: {what}"))?;
        }
        let mut tally = Tally::default();
        self.compare(&mut tally, &trained[0]);
        Ok(tally.verdict())
    }

    fn compare(&self, tally: &mut Tally, trained: &Trained) {
        let bounds = self.bounds();
        let curves = [
            ("loss", &trained.loss, &self.expected.loss, bounds.loss),
            ("grad_norm", &trained.grad_norm, &self.expected.grad_norm, bounds.grad_norm),
        ];
        for (what, got, expected, bound) in curves {
            for (step, (&got, &expected)) in got.iter().zip(expected).enumerate() {
                tally.within(got, expected, bound * expected.abs(), || {
                    format!("{what} of step {step}")
                });
            }
        }
        if let (Some(bound), Some(expected)) = (bounds.parameters, &self.expected.parameters) {
            for (name, expected) in expected {
                let error = self.relative_error(name, &trained.parameters[name], expected);
                tally.within(error, 0.0, bound, || format!("relative error of {name}"));
            }
        }
    }

    /// Norm of the difference over norm of the expected values.
    fn relative_error(&self, name: &str, got: &[f32], expected: &[f32]) -> f64 {
        let width = self.model.width;
        // The true gradient of the keys' bias is zero, and Adam amplifies the noise.
        let keys_bias = if name.ends_with("attn.qkv.bias") { width..2 * width } else { 0..0 };
        let mut difference = 0.0;
        let mut norm = 0.0;
        for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
            if !keys_bias.contains(&index) {
                difference += (f64::from(*got) - f64::from(*expected)).powi(2);
                norm += f64::from(*expected).powi(2);
            }
        }
        if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
    }

    /// All ranks equal bit for bit.
    fn check_agreement(&self, trained: &[Trained]) -> Result<(), String> {
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (rank, of_rank) in self.mesh.ranks().zip(trained) {
            for (what, got, other) in [
                ("losses", &of_rank.loss, &trained[0].loss),
                ("gradient norms", &of_rank.grad_norm, &trained[0].grad_norm),
            ] {
                if bits(got) != bits(other) {
                    return Err(format!("ranks {rank} and 0 have different {what}"));
                }
            }
            for (name, values) in &of_rank.parameters {
                if let Some(at) = first_difference(values, &trained[0].parameters[name]) {
                    return Err(format!("{name}[{at}]: ranks {rank} and 0 differ"));
                }
            }
        }
        Ok(())
    }

    fn run_rank(&self, world: World, placement: Placement) -> Result<Trained, hsdp_candle::Error> {
        let rank = world.rank();
        let gpt = Gpt::new(self.model).expect("checked when the case was read");
        let initial = |param: &hsdp::Param| self.initial[&param.name].clone();
        let mut model =
            ShardedModel::new(world.clone(), self.model.spec(), self.options(placement), initial)?;
        let mut adamw = AdamW::new(&model, self.adamw);
        let before = world.ledger();
        let mut loss = Vec::new();
        let mut grad_norm = Vec::new();
        for step_index in 0..self.steps {
            let mut step = model.begin_step(StepOptions::microbatches(self.microbatches))?;
            for microbatch in 0..self.microbatches {
                let (inputs, targets) = self.sequences(step_index, microbatch, rank)?;
                let pass = Pass::new(step.microbatch()?)?;
                let mean = gpt.loss(&pass, &inputs, &targets)?;
                pass.backward(&mean, (self.batch * self.model.context) as u64)?;
            }
            let gradients = step.finish()?;
            loss.push(gradients.loss());
            grad_norm.push(gradients.norm());
            adamw.step(&mut model, gradients.clip(self.max_norm))?;
        }
        let flows = world.ledger().since(&before);
        let steps = self.steps as u64;
        let microbatches = self.microbatches as u64;
        let ledger = ledger::against_plan(model.plan(), rank, steps, microbatches, &flows);
        Ok(Trained { loss, grad_norm, parameters: model.full_parameters()?, ledger })
    }

    pub(super) fn options(&self, placement: Placement) -> ModelOptions {
        let f16 = [self.param_dtype, self.reduce_dtype].contains(&DType::F16);
        ModelOptions {
            precision: Precision {
                parameters: self.param_dtype,
                wire: self.reduce_dtype,
                output: None,
            },
            loss_scaling: if f16 { LossScaling::Fixed(F16_LOSS_SCALE) } else { LossScaling::Off },
            placement,
            ..ModelOptions::on(self.mesh)
        }
    }

    /// A rank's inputs and targets of one microbatch, both `[batch, context]`.
    fn sequences(
        &self,
        step: usize,
        microbatch: usize,
        rank: Rank,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let length = self.model.context + 1;
        let place = (step * self.microbatches + microbatch) * self.mesh.world_size() + rank.index();
        let tokens = &self.tokens[place * self.batch * length..][..self.batch * length];
        let tokens = Tensor::from_slice(tokens, (self.batch, length), &Device::Cpu)?;
        let part = |start| tokens.narrow(1, start, self.model.context)?.contiguous();
        Ok((part(0)?, part(1)?))
    }
}
