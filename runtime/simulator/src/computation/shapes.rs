//! The shapes of a unit's computation.

use hsdp_sharding::{DType, ModelSpec, Param, Role, Unit};

use super::Computation;
use crate::Error;

/// Facts of a model's computation that its description does not say.
#[derive(Clone, Copy)]
pub struct Hints<'a> {
    /// Whether rows of the parameter are looked up, so that it is the matrix of no product in its
    /// unit: [`is_lookup`] decides by names.
    pub lookup: &'a dyn Fn(&Param) -> bool,
    /// The attention of a unit: by names, of a unit with a parameter that [`is_attention`].
    pub attention: &'a dyn Fn(&Unit) -> Option<AttentionShape>,
}

impl std::fmt::Debug for Hints<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hints").finish_non_exhaustive()
    }
}

/// The attention of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Heads of the queries.
    pub heads: usize,
    /// Elements of a head.
    pub size: usize,
    /// The way in which scores are computed.
    pub scores: AttentionScores,
}

/// The way in which an attention computes its scores, one for each head and pair of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionScores {
    /// They are in memory between kernels, all of them.
    Stored,
    /// One kernel computes them in pieces, only those of earlier tokens (FlashAttention, causal). A
    /// backward computes them again.
    Fused,
    /// As `Fused`, and a token has scores with this many tokens at most, itself among them (sliding
    /// windows).
    Window(usize),
}

/// Returns whether a parameter is that of a lookup, by its name: it has `emb`, `wte` or `wpe` in
/// it, and two dims.
#[must_use]
pub fn is_lookup(param: &Param) -> bool {
    param.shape.len() == 2 && ["emb", "wte", "wpe"].iter().any(|part| param.name.contains(part))
}

/// Returns whether a parameter is that of an attention, by its name: it has `attn`, `attention`,
/// `qkv`, `q_proj` or `wq` in it, and two dims.
#[must_use]
pub fn is_attention(param: &Param) -> bool {
    let parts = ["attn", "attention", "qkv", "q_proj", "wq"];
    param.shape.len() == 2 && parts.iter().any(|part| param.name.contains(part))
}

/// A product of activations with a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerProduct {
    pub(super) dims: [usize; 2],
    pub(super) role: Role,
}

impl LayerProduct {
    /// Returns the product with a parameter, or `None` if it is no matrix.
    pub(super) fn of(param: &Param) -> Option<Self> {
        let dims = <[usize; 2]>::try_from(param.shape.as_slice()).ok()?;
        Some(Self { dims, role: param.role })
    }

    pub(super) const fn elements(&self) -> f64 {
        self.dims[0] as f64 * self.dims[1] as f64
    }

    /// Returns the elements of an input and of a result, for a token.
    pub(super) const fn widths(&self) -> f64 {
        self.dims[0] as f64 + self.dims[1] as f64
    }

    pub(super) fn larger(&self) -> usize {
        self.dims[0].max(self.dims[1])
    }

    pub(super) fn smaller(&self) -> usize {
        self.dims[0].min(self.dims[1])
    }
}

/// The shapes of a unit's computation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct UnitShapes {
    /// In the order of the parameters.
    pub(super) products: Vec<LayerProduct>,
    /// Elements of a row, by lookup.
    pub(super) lookups: Vec<usize>,
    pub(super) attention: Option<AttentionShape>,
    /// Trainable parameters, and their elements.
    pub(super) trained: (usize, f64),
    /// The dtype in which it computes, if not in that of the batch.
    pub(super) compute: Option<DType>,
}

/// A product with an alias of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tied {
    pub(super) product: LayerProduct,
    /// The dtype in which the unit of the matrix computes, if not in that of the batch.
    pub(super) compute: Option<DType>,
}

impl UnitShapes {
    pub(super) fn of(unit: &Unit, hints: &Hints<'_>) -> Result<Self, Error> {
        let attention = (hints.attention)(unit);
        let name = &unit.name;
        let problem = match attention {
            Some(AttentionShape { heads, size, .. }) if heads == 0 || size == 0 => {
                Some(format!("unit `{name}` has an attention of {heads} heads of size {size}"))
            }
            Some(AttentionShape { scores: AttentionScores::Window(0), .. }) => {
                Some(format!("unit `{name}` has an attention with a window of 0 tokens"))
            }
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(Error::Computation { problem });
        }
        let is_lookup = |param: &&Param| (hints.lookup)(param);
        let products = unit.params.iter().filter(|param| !is_lookup(param));
        let lookups = unit.params.iter().filter(is_lookup);
        let trained = unit.params.iter().filter(|param| param.role == Role::Trainable);
        Ok(Self {
            products: products.filter_map(LayerProduct::of).collect(),
            lookups: lookups.filter_map(|param| param.shape.last().copied()).collect(),
            attention,
            trained: (trained.count(), unit.trainable_numel().0 as f64),
            compute: unit.compute_dtype,
        })
    }

    /// Returns the elements of all inputs and results of its products, for a token.
    pub(super) fn widths(&self) -> f64 {
        self.products.iter().map(LayerProduct::widths).sum()
    }
}

/// A GPT with the shapes of GPT-2, and with its head tied to the embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GptShape {
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

impl GptShape {
    /// Returns its description: units `embedding`, `blocks.0` and so on, and `norm`. Matrices have
    /// a row for each result.
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

    /// Returns its computation, with stored scores.
    ///
    /// # Errors
    /// [`Error::Computation`] if the heads do not divide the width, and those of
    /// [`Computation::of`].
    pub fn computation(&self) -> Result<Computation, Error> {
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            let problem = format!("{} heads do not divide the width, {}", self.heads, self.width);
            return Err(Error::Computation { problem });
        }
        let size = self.width / self.heads;
        let attention = AttentionShape { heads: self.heads, size, scores: AttentionScores::Stored };
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
