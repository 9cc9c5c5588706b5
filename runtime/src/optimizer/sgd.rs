//! SGD, with momentum if wanted, as PyTorch computes it.

use hsdp_kernels::cuda::CudaError;
use hsdp_kernels::{MomentumKind, SgdStep};

use crate::optimizer::grouped::Grouped;
use crate::optimizer::interface::{DeviceRun, Run};
use crate::optimizer::rule::{MOMENTUM_KINDS, Rule, RunState, Setting, choice};
use crate::options::allowed::Allowed;

/// SGD on this rank's shards. With momentum it keeps an f32 for each element, without it nothing.
pub type Sgd = Grouped<SgdOptions>;

/// Whether and how past gradients enter an update.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Momentum {
    /// Not at all; no state is kept.
    #[default]
    Off,
    /// The update follows a velocity. Each step keeps this fraction of it, which is below 1.
    Classic(f64),
    /// Likewise, looking one step ahead.
    Nesterov(f64),
}

impl Momentum {
    /// Returns the momentum that keeps this fraction: none if it is 0.
    fn of(kind: MomentumKind, fraction: f64) -> Self {
        match kind {
            _ if fraction == 0.0 => Self::Off,
            MomentumKind::Classic => Self::Classic(fraction),
            MomentumKind::Nesterov => Self::Nesterov(fraction),
        }
    }
}

/// The parameters of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// The learning rate.
    pub learning_rate: f64,
    /// Whether and how past gradients enter.
    pub momentum: Momentum,
    /// The fraction of a parameter that is added to its gradient.
    pub weight_decay: f64,
}

impl Default for SgdOptions {
    fn default() -> Self {
        Self { learning_rate: 1e-2, momentum: Momentum::Off, weight_decay: 0.0 }
    }
}

impl Rule for SgdOptions {
    const KIND: &'static str = "sgd";
    const ON_DEVICE: bool = true;

    fn options(&mut self, see: &mut dyn FnMut(&'static str, Setting<'_>)) {
        let SgdStep { mut momentum, mut kind, .. } = self.of_step(1.0);
        let now = (momentum, kind);
        see("learning_rate", Setting::Rate(&mut self.learning_rate));
        see("momentum", Setting::Number(&mut momentum, Allowed::Fraction));
        choice(see, "momentum_kind", &mut kind, &MOMENTUM_KINDS);
        see("weight_decay", Setting::Number(&mut self.weight_decay, Allowed::NotNegative));
        if now != (momentum, kind) {
            self.momentum = Momentum::of(kind, momentum);
        }
    }

    fn kinds(&self) -> &'static [&'static str] {
        if self.momentum == Momentum::Off { &[] } else { &["momentum_buffer"] }
    }

    fn update(&self, _: u64, run: Run<'_>, state: RunState<'_>) {
        let step = self.of_step(run.clip);
        hsdp_kernels::sgd(&step, run.parameters, run.gradient, state.only());
    }

    fn update_on_device(&self, run: DeviceRun<'_>, state: RunState<'_>) -> Result<(), CudaError> {
        let pieces = state.pieces(&run.pieces);
        run.stream.sgd(run.update, &pieces, &self.of_step(run.clip), state.only_on_device())
    }
}

impl SgdOptions {
    /// An update.
    fn of_step(&self, clip: f32) -> SgdStep {
        let (momentum, kind) = match self.momentum {
            Momentum::Off => (0.0, MomentumKind::Classic),
            Momentum::Classic(momentum) => (momentum, MomentumKind::Classic),
            Momentum::Nesterov(momentum) => (momentum, MomentumKind::Nesterov),
        };
        let Self { learning_rate, weight_decay, .. } = *self;
        SgdStep { learning_rate, momentum, kind, weight_decay, clip }
    }
}
