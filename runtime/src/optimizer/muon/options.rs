//! The options of Muon.

use std::fmt::{self, Display};

use hsdp_kernels::{MomentumKind, MuonStep, NewtonSchulz};
use hsdp_sharding::{DType, WholeMatrix};
use serde_json::{Value, json};

use crate::error::Error;
use crate::optimizer::options::{Allowed, check_options};
use crate::optimizer::rule::OptimizerOptions;

/// The parameters of Muon. The defaults are those of PyTorch, but for the dtype of the iterations, which is bf16 there and f32 here.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonOptions {
    /// The learning rate, before [`rate_scale`](Self::rate_scale).
    pub learning_rate: f64,
    /// The decay factor of the momentum.
    pub momentum: f64,
    /// Whether the direction looks one step ahead.
    pub nesterov: MomentumKind,
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
    /// 0.2 times the root of the larger dim, which makes updates as large as those of AdamW (Liu et al., arXiv 2502.16982): PyTorch's
    /// `match_rms_adamw`.
    MatchRmsAdamW,
}

impl RateScale {
    #[expect(clippy::cast_precision_loss, reason = "sizes of matrices")]
    fn of(self, matrix: &WholeMatrix) -> f64 {
        let (rows, columns) = (matrix.rows as f64, matrix.columns as f64);
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
            nesterov: MomentumKind::Nesterov,
            weight_decay: 0.1,
            newton_schulz: NewtonSchulz::default(),
            rate_scale: RateScale::default(),
        }
    }
}

impl MuonOptions {
    /// An update of elements of a matrix.
    pub(super) fn of_step(&self, matrix: &WholeMatrix, clip: f32) -> MuonStep {
        MuonStep {
            rate: self.learning_rate * self.rate_scale.of(matrix),
            decay: self.learning_rate * self.weight_decay,
            momentum: self.momentum,
            kind: self.nesterov,
            clip,
        }
    }
}

impl OptimizerOptions for MuonOptions {
    const KIND: &'static str = "muon";

    fn learning_rate(&mut self) -> &mut f64 {
        &mut self.learning_rate
    }

    fn check(&self, of: &dyn Display) -> Result<(), Error> {
        let Self { learning_rate, momentum, weight_decay, newton_schulz, .. } = *self;
        let options = [
            ("learning_rate", learning_rate, Allowed::NotNegative),
            ("momentum", momentum, Allowed::Fraction),
            ("weight_decay", weight_decay, Allowed::NotNegative),
            ("newton_schulz.eps", newton_schulz.eps, Allowed::NotNegative),
        ];
        check_options(of, options)?;
        let [a, b, c] = newton_schulz.coefficients;
        let problem = match newton_schulz {
            NewtonSchulz { dtype: DType::F32 | DType::BF16, .. } if (a + b + c).is_finite() => {
                return Ok(());
            }
            NewtonSchulz { dtype: DType::F32 | DType::BF16, coefficients, .. } => {
                format!("coefficients {coefficients:?}: they must be finite")
            }
            NewtonSchulz { dtype, .. } => format!("dtype {dtype}: it must be f32 or bf16"),
        };
        Err(Error::Options { what: format!("{of} newton_schulz.{problem}") })
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, of: &dyn Display) -> fmt::Result {
        let Self { learning_rate, momentum, nesterov, weight_decay, newton_schulz, rate_scale } =
            *self;
        writeln!(f, "{of} learning_rate {learning_rate:?}")?;
        writeln!(f, "{of} momentum {momentum:?} {nesterov:?}")?;
        writeln!(f, "{of} weight_decay {weight_decay:?}")?;
        writeln!(f, "{of} {newton_schulz:?}")?;
        writeln!(f, "{of} rate_scale {rate_scale:?}")
    }

    fn json(&self) -> Value {
        let Self { learning_rate, momentum, nesterov, weight_decay, newton_schulz, rate_scale } =
            *self;
        let NewtonSchulz { steps, coefficients, eps, dtype } = newton_schulz;
        json!({
            "learning_rate": learning_rate,
            "momentum": momentum,
            "nesterov": nesterov == MomentumKind::Nesterov,
            "weight_decay": weight_decay,
            "newton_schulz": { "steps": steps, "coefficients": coefficients, "eps": eps, "dtype": dtype.to_string() },
            "rate_scale": format!("{rate_scale:?}"),
        })
    }
}
