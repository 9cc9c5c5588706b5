//! Gemma 2: four norms a block that scale by 1 + w, caps of scores and logits, a scaled embedding,
//! and a window in every other layer.

use super::{DEFAULTS, Defaults, Family};
use crate::decoder::config::keys::Effect;
use crate::decoder::config::rope::Rotation;
use crate::decoder::config::{Biases, BlockNorms, NormScale, above_0};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    keys: &[&[
        (
            Effect::Read,
            &[
                "hidden_activation",
                "attention_bias",
                "query_pre_attn_scalar",
                "sliding_window",
                "layer_types",
                "attn_logit_softcapping",
                "final_logit_softcapping",
            ],
        ),
        (Effect::Only(&["false", "null"]), &["use_bidirectional_attention"]),
        // The cache matters in generation only. transformers ignores the other keys.
        (Effect::None, &["cache_implementation", "hidden_act", "sliding_window_size"]),
    ]],
    defaults: Defaults {
        vocab_size: 256_000,
        hidden_size: 2304,
        intermediate_size: 9216,
        num_hidden_layers: 26,
        num_attention_heads: 8,
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        max_position_embeddings: 8192,
        tie_word_embeddings: true,
        pad_token_id: Some(0),
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let biased = keys.or("attention_bias", false)?;
        config.biases = Biases { qkv: biased, output: biased, mlp: false };
        config.block_norms = BlockNorms {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_attention_layernorm"),
            before_mlp: Some("pre_feedforward_layernorm"),
            after_mlp: Some("post_feedforward_layernorm"),
        };
        config.norm_scale = NormScale::OnePlusWeight;
        #[expect(clippy::cast_precision_loss, reason = "a width is below 2^24")]
        let width = config.hidden_size as f64;
        config.embedding_scale = Some(width.sqrt());
        let scalar: f64 = keys.or("query_pre_attn_scalar", 256.0)?;
        above_0(&[("query_pre_attn_scalar", scalar)])?;
        config.attention_scale = 1.0 / scalar.sqrt();
        config.attention_cap = keys.or("attn_logit_softcapping", Some(50.0))?;
        config.logit_cap = keys.or("final_logit_softcapping", Some(30.0))?;
        // transformers requires a window even if no layer uses it.
        let window = keys.or("sliding_window", 4096)?;
        config.set_windows(keys, Some(window), |index, _| index.is_multiple_of(2))?;
        config.check_division()
    },
};
