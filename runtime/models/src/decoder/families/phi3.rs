//! Phi-3: packed weights of queries, keys and values, and of gate and up; a window in all layers;
//! a part of each head may be rotated.

use super::{DEFAULTS, Defaults, Family};
use crate::decoder::config::Packing;
use crate::decoder::config::keys::Effect;
use crate::decoder::config::rope::Rotation;

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    keys: &[&[
        (Effect::Read, &["sliding_window"]),
        (Effect::Only(&["0"]), &["resid_pdrop", "embd_pdrop"]),
        (Effect::Only(&["false", "null"]), &["attention_bias", "mlp_bias", "lm_head_bias"]),
        (Effect::Only(&["1", "null"]), &["full_attn_mod", "interpolate_factor"]),
        // Only longrope, which is refused, uses it.
        (Effect::None, &["original_max_position_embeddings"]),
        // It names code that transformers does not run for this family.
        (Effect::None, &["auto_map"]),
    ]],
    defaults: Defaults {
        vocab_size: 32_064,
        hidden_size: 3072,
        intermediate_size: 8192,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-5,
        pad_token_id: Some(32_000),
        ..DEFAULTS
    },
    rotation: Rotation::Partial,
    read: |keys, config| {
        config.packing = Packing::Packed;
        let window = keys.optional("sliding_window")?;
        config.layers.iter_mut().for_each(|layer| layer.window = window);
        Ok(())
    },
};
