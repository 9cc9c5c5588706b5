//! OLMo 2: norms after attention and MLP, and norms of queries and keys over all heads.

use super::{DEFAULTS, Defaults, Family};
use crate::decoder::config::keys::Effect;
use crate::decoder::config::rope::Rotation;
use crate::decoder::config::{Biases, BlockNorms, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    keys: &[&[(Effect::Read, &["attention_bias"])]],
    defaults: Defaults {
        vocab_size: 50_304,
        rms_norm_eps: 1e-5,
        pad_token_id: Some(1),
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let biased = keys.or("attention_bias", false)?;
        config.biases = Biases { qkv: biased, output: biased, mlp: false };
        config.block_norms = BlockNorms {
            before_attention: None,
            after_attention: Some("post_attention_layernorm"),
            before_mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        };
        config.qk_norm = Some(QkNorm::Whole);
        Ok(())
    },
};
