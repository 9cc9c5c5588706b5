//! The sizes of a GPT, and its parameters as a `ModelSpec`.

use hsdp_sharding::{ModelSpec, Param, Unit};

/// The sizes of a GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// Number of different tokens.
    pub vocab: usize,
    /// Length of the longest sequence, in tokens.
    pub context: usize,
    /// Number of elements in the residual stream.
    pub width: usize,
    /// Number of attention heads in a block. It divides the width.
    pub heads: usize,
    /// Number of blocks.
    pub layers: usize,
}

/// Error of sizes that make no GPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A size is 0.
    #[error("{size} is 0: the least is 1")]
    Zero {
        /// Name of the size.
        size: &'static str,
    },
    /// A size is above [`GptConfig::MAX_SIZE`] or [`GptConfig::MAX_LAYERS`].
    #[error("{size} is {count}: the most is {most}")]
    TooLarge {
        /// Name of the size.
        size: &'static str,
        /// Value of the size.
        count: usize,
        /// Largest allowed value.
        most: usize,
    },
    /// The heads do not divide the width.
    #[error("width {width} is not divisible by {heads} heads")]
    Heads {
        /// Width of the residual stream.
        width: usize,
        /// Number of heads.
        heads: usize,
    },
}

impl GptConfig {
    /// Maximum `vocab`, `context`, `width` and `heads`, 2^24. The elements of a block of such sizes
    /// fit 64 bits.
    pub const MAX_SIZE: usize = 1 << 24;

    /// Maximum number of blocks. A description of more would take long to plan.
    pub const MAX_LAYERS: usize = 10_000;

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab", self.vocab, Self::MAX_SIZE),
            ("context", self.context, Self::MAX_SIZE),
            ("width", self.width, Self::MAX_SIZE),
            ("heads", self.heads, Self::MAX_SIZE),
            ("layers", self.layers, Self::MAX_LAYERS),
        ];
        for (size, count, most) in sizes {
            match count {
                0 => return Err(ConfigError::Zero { size }),
                count if count > most => return Err(ConfigError::TooLarge { size, count, most }),
                _ => {}
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            return Err(ConfigError::Heads { width: self.width, heads: self.heads });
        }
        Ok(())
    }

    /// Returns the model's parameters: the unit `root`, then one unit for each block, in the order
    /// of the forward.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        let spec = ModelSpec::new().setting("heads", self.heads).unit(self.root());
        (0..self.layers).fold(spec, |spec, layer| spec.unit(self.block(layer)))
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
