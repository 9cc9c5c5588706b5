//! The options of Muon, and the matrices for which they are the same.

use hsdp_kernels::{MomentumKind, MuonStep, NewtonSchulz};
use hsdp_sharding::{ParamId, WholeMatrix};

use crate::optimizer::exchange::{Bundle, MatrixExchange};
use crate::optimizer::interface::Updating;

/// The parameters of Muon. The defaults are those of PyTorch, except the dtype of the iterations,
/// which is bf16 there and f32 here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonOptions {
    /// The learning rate, before [`rate_scale`](Self::rate_scale).
    pub learning_rate: f64,
    /// The decay factor of the momentum.
    pub momentum: f64,
    /// Along the momentum, or one step ahead.
    pub momentum_kind: MomentumKind,
    /// Before the update, the parameters shrink by learning rate x weight decay.
    pub weight_decay: f64,
    /// The iterations that orthogonalize a matrix: in f32 or bf16.
    pub newton_schulz: NewtonSchulz,
    /// The factor of the learning rate that depends on the shape of a matrix.
    pub rate_scale: RateScale,
}

/// The factor of Muon's learning rate for a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RateScale {
    /// The root of max(1, rows / columns), as in K. Jordan's original and in PyTorch's default.
    #[default]
    Original,
    /// 0.2 times the root of the larger dim, which makes updates as large as those of AdamW (Liu et
    /// al., arXiv 2502.16982). It is PyTorch's `match_rms_adamw`.
    MatchRmsAdamW,
}

impl RateScale {
    #[expect(clippy::cast_precision_loss, reason = "sizes of matrices")]
    fn of(self, matrix: &WholeMatrix) -> f64 {
        let rows = matrix.rows as f64;
        let columns = matrix.columns as f64;
        match self {
            Self::Original => (rows / columns).max(1.0).sqrt(),
            Self::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

impl Default for MuonOptions {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            momentum: 0.95,
            momentum_kind: MomentumKind::Nesterov,
            weight_decay: 0.1,
            newton_schulz: NewtonSchulz::default(),
            rate_scale: RateScale::default(),
        }
    }
}

impl MuonOptions {
    /// Returns an update of elements of a matrix.
    pub(super) fn of_step(&self, matrix: &WholeMatrix, clip: f32) -> MuonStep {
        MuonStep {
            rate: self.learning_rate * self.rate_scale.of(matrix),
            decay: self.learning_rate * self.weight_decay,
            momentum: self.momentum,
            kind: self.momentum_kind,
            clip,
        }
    }
}

/// Returns the bundles of an update: matrices of one shape with equal iterations.
pub(super) fn bundles<'a>(
    exchange: &'a MatrixExchange,
    options: &dyn Fn(ParamId) -> MuonOptions,
    updating: &Updating<'_>,
) -> Vec<Bundle<'a>> {
    exchange.together(|matrix| {
        updating.updates(matrix.param).then(|| options(matrix.param).newton_schulz)
    })
}

/// The contract between Muon and its state, in a panic that cannot be.
pub(super) const EXCHANGES: &str = "Muon has matrices";
