//! Bundled models, with the published shapes and parameter names.

use std::iter;

use hsdp_sharding::{ModelSpec, Param, Unit};
use hsdp_simulator::{Attention, Scores};

use super::{Adapters, Model, decoder, no_adapters};

/// Names of the bundled models.
pub(super) const NAMES: [&str; 3] = ["gpt2-small", "llama3-8b", "llama3-70b"];

/// Returns the model of this name, if it is bundled.
pub(super) fn find(name: &str, adapters: Option<Adapters>) -> Option<Result<Model, String>> {
    let config = match name {
        "gpt2-small" => return Some(no_adapters(adapters).map(|()| gpt2_small())),
        "llama3-8b" => include_str!("llama3-8b.json"),
        "llama3-70b" => include_str!("llama3-70b.json"),
        _ => return None,
    };
    Some(decoder::read(config, adapters))
}

/// Describes GPT-2. The head is the embedding. A parameter is in one unit, so the unit `root` has
/// both, and is kept.
fn gpt2_small() -> Model {
    const WIDTH: usize = 768;
    let root = Unit::new("root")
        .param(Param::new("wte.weight", [50_257, WIDTH]))
        .param(Param::new("wpe.weight", [1024, WIDTH]))
        .param(Param::new("ln_f.weight", [WIDTH]))
        .param(Param::new("ln_f.bias", [WIDTH]))
        .keep();
    let spec = (0..12).fold(ModelSpec::new().unit(root), |spec, layer| {
        spec.unit(gpt2_block(&format!("h.{layer}"), WIDTH))
    });
    let attention = Attention { heads: 12, size: 64, scores: Scores::Fused };
    Model::by_names(spec.tie("lm_head.weight", "wte.weight"), iter::repeat(attention))
}

/// Describes a block. The rows of matrices are inputs, as in the published model.
fn gpt2_block(name: &str, width: usize) -> Unit {
    let matrices = [
        ("attn.c_attn", [width, 3 * width]),
        ("attn.c_proj", [width, width]),
        ("mlp.c_fc", [width, 4 * width]),
        ("mlp.c_proj", [4 * width, width]),
    ];
    let norms = ["ln_1", "ln_2"].into_iter().fold(Unit::new(name), |unit, norm| {
        unit.param(Param::new(format!("{name}.{norm}.weight"), [width]))
            .param(Param::new(format!("{name}.{norm}.bias"), [width]))
    });
    matrices.into_iter().fold(norms, |unit, (matrix, shape)| {
        unit.param(Param::new(format!("{name}.{matrix}.weight"), shape))
            .param(Param::new(format!("{name}.{matrix}.bias"), [shape[1]]))
    })
}
