//! AdamW, as PyTorch computes it.

use hsdp_kernels::AdamWStep;
use hsdp_kernels::cuda::CudaError;

use crate::model::ShardedModel;
use crate::optimizer::grouped::{Grouped, StateForm};
use crate::optimizer::interface::{ClippedGradient, DeviceRun, Run};
use crate::optimizer::rule::{Rule, RunState, Setting};
use crate::optimizer::state::eight_bit;
use crate::options::allowed::Allowed;

/// AdamW (Loshchilov and Hutter, arXiv 1711.05101) on this rank's shards, with two f32 of state for
/// each element.
pub type AdamW = Grouped<AdamWOptions>;

impl AdamW {
    /// AdamW whose moments take 8 bits an element, in blocks of 256 elements with a scale each
    /// (Dettmers et al., arXiv 2110.02861), for this rank's shards of a model on the host. Its kind
    /// is `adamw8bit`.
    ///
    /// A rank keeps two bytes for each element and two f32 for each block. Parameters declare their
    /// blocks before the plan is made ([`Param::blocks`](hsdp_sharding::Param::blocks)`(256)`), so
    /// that shards are cut between blocks, and the bits of an update are the same on any mesh. The
    /// first update refuses others by name.
    ///
    /// A checkpoint has the codes, from 0 to 255, as f32, and the scales.
    #[must_use]
    pub fn with_eight_bit_state(model: &ShardedModel, options: AdamWOptions) -> Self {
        Self::with_form(model, "adamw8bit", StateForm::EightBit, options)
    }
}

/// The parameters of AdamW. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// The decay of the first and of the second moment.
    pub betas: (f64, f64),
    /// Added to the root of the corrected second moment. It is above 0: without it an element that
    /// has had no gradient would become NaN.
    pub eps: f64,
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl Rule for AdamWOptions {
    const KIND: &'static str = "adamw";
    const COUNTS: bool = true;
    const ON_DEVICE: bool = true;

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("betas.0", Setting::Number(&mut self.betas.0, Allowed::Fraction));
        see("betas.1", Setting::Number(&mut self.betas.1, Allowed::Fraction));
        see("eps", Setting::Number(&mut self.eps, Allowed::Positive));
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
    }

    fn kinds(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(&self, number: u64, run: Run<'_>, state: RunState<'_>) {
        let ClippedGradient { values: gradient, clip } = run.gradient;
        let step = self.of_step(number, clip);
        if let Some(moments) = eight_bit(&mut state.state.kinds, run.unit, &run.piece) {
            return hsdp_kernels::adamw_8bit(&step, run.parameters, gradient, moments);
        }
        let [first, second] = state.kinds();
        hsdp_kernels::adamw(&step, run.parameters, gradient, first, second);
    }

    fn update_on_device(&self, run: DeviceRun<'_>, state: RunState<'_>) -> Result<(), CudaError> {
        let pieces = state.pieces(&run.pieces);
        let [first, second] = state.on_device();
        run.stream.adamw(run.update, &pieces, &self.of_step(1, run.clip), first, second)
    }
}

impl AdamWOptions {
    /// An update, the `step`-th of its parameter.
    fn of_step(&self, step: u64, clip: f32) -> AdamWStep {
        AdamWStep {
            learning_rate: self.learning_rate,
            beta1: self.betas.0,
            beta2: self.betas.1,
            epsilon: self.eps,
            weight_decay: self.weight_decay,
            step,
            clip,
        }
    }
}
