//! The GPT of published tables.

use hsdp_sharding::{ModelSpec, Param, Unit};

use super::Computation;
use super::shapes::{Attention, Hints, Scores, is_attention, is_lookup};
use crate::Error;

/// A GPT with the shapes of GPT-2, and with its head tied to the embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gpt {
    /// Elements of the activations of a token.
    pub width: usize,
    /// Heads of an attention; they divide the width.
    pub heads: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Positions.
    pub context: usize,
    /// Tokens that there are.
    pub vocabulary: usize,
}

impl Gpt {
    /// Its description: units `embedding`, `blocks.0` and so on, and `norm`. Matrices have a row for each result.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        let width = self.width;
        let embedding = Unit::new("embedding")
            .param(Param::new("wte", [self.vocabulary, width]))
            .param(Param::new("wpe", [self.context, width]))
            .keep();
        let blocks = (0..self.layers)
            .fold(ModelSpec::new().unit(embedding), |spec, layer| spec.unit(block(layer, width)));
        blocks.unit(norm(Unit::new("norm"), "norm", width).keep()).tie("head", "wte")
    }

    /// Its computation, with stored scores.
    ///
    /// # Errors
    /// [`Error::Computation`] if the heads do not divide the width, and those of [`Computation::of`].
    pub fn computation(&self) -> Result<Computation, Error> {
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            let problem = format!("{} heads do not divide the width, {}", self.heads, self.width);
            return Err(Error::Computation { problem });
        }
        let size = self.width / self.heads;
        let attention = Attention { heads: self.heads, size, scores: Scores::Stored };
        let of_unit = |unit: &Unit| unit.params.iter().any(is_attention).then_some(attention);
        Computation::of(&self.spec(), &Hints { lookup: &is_lookup, attention: &of_unit })
    }
}

fn block(layer: usize, width: usize) -> Unit {
    let name = format!("blocks.{layer}");
    let matrices = [
        ("attn.qkv", 3 * width, width),
        ("attn.out", width, width),
        ("mlp.up", 4 * width, width),
        ("mlp.down", width, 4 * width),
    ];
    let norms = ["norm_1", "norm_2"]
        .into_iter()
        .fold(Unit::new(&name), |unit, it| norm(unit, &format!("{name}.{it}"), width));
    matrices.into_iter().fold(norms, |unit, (matrix, out, of)| {
        unit.param(Param::new(format!("{name}.{matrix}.weight"), [out, of]))
            .param(Param::new(format!("{name}.{matrix}.bias"), [out]))
    })
}

fn norm(unit: Unit, name: &str, width: usize) -> Unit {
    unit.param(Param::new(format!("{name}.weight"), [width]))
        .param(Param::new(format!("{name}.bias"), [width]))
}
