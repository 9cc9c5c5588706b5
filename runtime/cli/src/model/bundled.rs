//! Bundled models, with the published shapes and parameter names.

use hsdp_sharding::{ModelSpec, Param, Unit};
use hsdp_simulator::{Attention, Scores, is_attention, is_lookup};

use super::Model;

/// Their names.
pub(super) const NAMES: [&str; 3] = ["gpt2-small", "llama3-8b", "llama3-70b"];

/// The model of this name.
pub(super) fn find(name: &str) -> Option<Model> {
    let (spec, heads, size) = match name {
        "gpt2-small" => (gpt2_small(), 12, 64),
        "llama3-8b" => (llama3(&Llama3 { width: 4096, layers: 32, hidden: 14_336 }), 32, 128),
        "llama3-70b" => (llama3(&Llama3 { width: 8192, layers: 80, hidden: 28_672 }), 64, 128),
        _ => return None,
    };
    let attention = Attention { heads, size, scores: Scores::Fused };
    let blocks = spec.units().iter().filter(|unit| unit.params.iter().any(is_attention));
    let attentions = blocks.map(|unit| (unit.name.clone(), attention)).collect();
    let lookups = spec.params().map(|(_, param)| param).filter(|param| is_lookup(param));
    let lookups = lookups.map(|param| param.name.clone()).collect();
    Some(Model { spec, attentions, lookups })
}

/// The head is the embedding, and a parameter is in one unit, so the unit `root` has both, and is kept.
fn gpt2_small() -> ModelSpec {
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
    spec.tie("lm_head.weight", "wte.weight")
}

/// The rows of matrices are inputs, as in the published model.
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

/// The sizes that differ between models of the family.
struct Llama3 {
    width: usize,
    layers: usize,
    hidden: usize,
}

const VOCABULARY: usize = 128_256;

/// Eight heads of 128 for keys and values.
const KEYS: usize = 8 * 128;

/// The head is last in the forward and first in the backward, so it is kept.
fn llama3(model: &Llama3) -> ModelSpec {
    let table = [VOCABULARY, model.width];
    let embedding = Unit::new("embedding").param(Param::new("model.embed_tokens.weight", table));
    let head = Unit::new("head")
        .param(Param::new("model.norm.weight", [model.width]))
        .param(Param::new("lm_head.weight", table))
        .keep();
    let layers = 0..model.layers;
    let blocks = layers.fold(ModelSpec::new().unit(embedding), |spec, layer| {
        spec.unit(llama3_block(&format!("model.layers.{layer}"), model))
    });
    blocks.unit(head)
}

fn llama3_block(name: &str, model: &Llama3) -> Unit {
    let Llama3 { width, hidden, .. } = *model;
    let matrices = [
        ("self_attn.q_proj", [width, width]),
        ("self_attn.k_proj", [KEYS, width]),
        ("self_attn.v_proj", [KEYS, width]),
        ("self_attn.o_proj", [width, width]),
        ("mlp.gate_proj", [hidden, width]),
        ("mlp.up_proj", [hidden, width]),
        ("mlp.down_proj", [width, hidden]),
    ];
    let norms = ["input_layernorm", "post_attention_layernorm"];
    let unit = norms.into_iter().fold(Unit::new(name), |unit, norm| {
        unit.param(Param::new(format!("{name}.{norm}.weight"), [width]))
    });
    matrices.into_iter().fold(unit, |unit, (matrix, shape)| {
        unit.param(Param::new(format!("{name}.{matrix}.weight"), shape))
    })
}
