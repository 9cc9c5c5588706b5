//! Llama: the parts that other families change.

use super::{DEFAULTS, Family};
use crate::decoder::config::Biases;
use crate::decoder::config::keys::Effect;
use crate::decoder::config::rope::Rotation;

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    keys: &[&[
        (Effect::Read, &["attention_bias", "mlp_bias"]),
        (Effect::Only(&["false", "null"]), &["rope_interleaved"]),
        // `pretraining_tp` splits products of matrices into parts. transformers ignores the other
        // keys.
        (Effect::None, &["pretraining_tp", "max_sequence_length", "is_llama_config"]),
    ]],
    defaults: DEFAULTS,
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let of_attention = keys.or("attention_bias", false)?;
        let of_mlp = keys.or("mlp_bias", false)?;
        config.biases = Biases { qkv: of_attention, output: of_attention, mlp: of_mlp };
        config.check_division()
    },
};
