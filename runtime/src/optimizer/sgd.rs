//! SGD, with momentum if wanted, as PyTorch computes it.

use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::{MomentumKind, SgdStep};

use crate::optimizer::grouped::Grouped;
use crate::optimizer::interface::{ClippedGradient, DeviceRun, Run};
use crate::optimizer::rule::{MOMENTUM_KINDS, Rule, RunState, Setting, choice};
use crate::options::allowed::Allowed;

/// SGD on this rank's shards. With momentum it keeps an f32 for each element, without it nothing.
pub type Sgd = Grouped<SgdOptions>;

/// The parameters of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// The fraction of the velocity that each step keeps, below 1. If it is 0, no state is kept.
    pub momentum: f64,
    /// The way in which the velocity enters an update. It has no effect if `momentum` is 0, and
    /// counts as [`Classic`](MomentumKind::Classic) there.
    pub momentum_kind: MomentumKind,
    /// The fraction of a parameter that is added to its gradient.
    pub weight_decay: f64,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self {
            learning_rate: 1e-2,
            momentum: 0.0,
            momentum_kind: MomentumKind::Classic,
            weight_decay: 0.0,
        }
    }
}

impl Rule for SgdOptions {
    const KIND: &'static str = "sgd";
    const ON_DEVICE: bool = true;

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("momentum", Setting::Number(&mut self.momentum, Allowed::Fraction));
        if self.momentum == 0.0 {
            self.momentum_kind = MomentumKind::Classic;
        }
        choice(see, "momentum_kind", &mut self.momentum_kind, &MOMENTUM_KINDS);
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
    }

    fn kinds(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn update(&self, _: u64, run: Run<'_>, state: RunState<'_>) {
        let ClippedGradient { values: gradient, clip } = run.gradient;
        hsdp_kernels::sgd(&self.of_step(clip), run.parameters, gradient, state.only());
    }

    fn update_on_device(&self, run: DeviceRun<'_>, state: RunState<'_>) -> Result<(), CudaError> {
        let pieces = state.pieces(&run.pieces);
        run.stream.sgd(run.update, &pieces, &self.of_step(run.clip), state.only_on_device())
    }
}

impl SgdOptions {
    /// An update.
    fn of_step(&self, clip: f32) -> SgdStep {
        let Self { learning_rate, momentum, momentum_kind: kind, weight_decay } = *self;
        SgdStep { learning_rate, momentum, kind, weight_decay, clip }
    }
}
