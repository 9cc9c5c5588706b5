//! The sizes of a GPT, and its parameters as a `ModelSpec`.

use hsdp_sharding::{ModelSpec, Param, Unit};

/// The sizes of a GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// The number of different tokens.
    pub vocab: usize,
    /// The longest sequence that the model can read, in tokens.
    pub context: usize,
    /// The number of elements of the residual stream.
    pub width: usize,
    /// The number of attention heads of a block; it divides the width.
    pub heads: usize,
    /// The number of blocks.
    pub layers: usize,
}

/// The error of sizes that make no GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A size is 0.
    #[error("{size} is 0: the least is 1")]
    Zero {
        /// The name of the size.
        size: &'static str,
    },
    /// The heads do not divide the width.
    #[error("width {width} is not divisible by {heads} heads")]
    Heads {
        /// The width.
        width: usize,
        /// The heads.
        heads: usize,
    },
}

impl GptConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab", self.vocab),
            ("context", self.context),
            ("width", self.width),
            ("heads", self.heads),
            ("layers", self.layers),
        ];
        if let Some((size, _)) = sizes.into_iter().find(|(_, count)| *count == 0) {
            return Err(ConfigError::Zero { size });
        }
        if !self.width.is_multiple_of(self.heads) {
            return Err(ConfigError::Heads { width: self.width, heads: self.heads });
        }
        Ok(())
    }

    /// The model's parameters: the unit `root`, then one unit a block, in the order of the forward.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        (0..self.layers)
            .fold(ModelSpec::new().unit(self.root()), |spec, layer| spec.unit(self.block(layer)))
    }

    fn root(&self) -> Unit {
        let Self { vocab, context, width, .. } = *self;
        Unit::new(super::ROOT)
            .param(Param::new("wte.weight", [vocab, width]))
            .param(Param::new("wpe.weight", [context, width]))
            .param(Param::new("ln_f.weight", [width]))
            .param(Param::new("ln_f.bias", [width]))
            .param(Param::new("lm_head.weight", [vocab, width]))
            .keep()
    }

    fn block(&self, layer: usize) -> Unit {
        let width = self.width;
        let name = format!("h.{layer}");
        let norm = |unit: Unit, norm: &str| {
            unit.param(Param::new(format!("{name}.{norm}.weight"), [width]))
                .param(Param::new(format!("{name}.{norm}.bias"), [width]))
        };
        let linear = |unit: Unit, linear: &str, rows: usize, columns: usize| {
            unit.param(Param::new(format!("{name}.{linear}.weight"), [rows, columns]))
                .param(Param::new(format!("{name}.{linear}.bias"), [rows]))
        };
        let unit = norm(Unit::new(&name), "ln_1");
        let unit = linear(unit, "attn.qkv", 3 * width, width);
        let unit = linear(unit, "attn.proj", width, width);
        let unit = norm(unit, "ln_2");
        let unit = linear(unit, "mlp.fc", 4 * width, width);
        linear(unit, "mlp.proj", width, 4 * width)
    }
}
