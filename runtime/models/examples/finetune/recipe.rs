//! How the model is trained.

use hsdp::Placement;
use hsdp::prelude::*;
use hsdp_models::decoder::{Decoder, DecoderConfig, Lora, Recomputation};

use serde_json::json;

use super::options::Options;
use super::shared::size;

/// Gradients longer than this are scaled down to it.
pub(crate) const MAX_NORM: f64 = 1.0;

/// Inner size of the MLP of a model with random weights, in widths.
const INNER: usize = 3;

/// Makes the model with the options' adapters and recomputation.
pub(crate) fn decoder(config: DecoderConfig, options: &Options) -> Decoder {
    let decoder = Decoder::new(config).recomputing(match options.recompute {
        true => Recomputation::Blocks,
        false => Recomputation::Off,
    });
    let Some(rank) = options.lora else { return decoder };
    let decoder = decoder.with_lora(Lora::of_rank(rank));
    match is_stored(options) {
        true => decoder.storing_frozen_in(options.run.param_dtype),
        false => decoder,
    }
}

/// Returns whether the frozen model is kept in 16 bits alone. An export then has the rounded values,
/// with which its adapters were trained.
fn is_stored(options: &Options) -> bool {
    options.run.param_dtype != DType::F32 && options.run.device == Placement::Host
}

/// Returns the config of a Llama with random weights.
pub(crate) fn small(vocab_size: usize, context: usize) -> DecoderConfig {
    let config = json!({
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": size::WIDTH,
        "intermediate_size": INNER * size::WIDTH,
        "num_hidden_layers": size::LAYERS,
        "num_attention_heads": size::HEADS,
        "num_key_value_heads": size::HEADS / 2,
        "head_dim": size::WIDTH / size::HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": { "rope_type": "default", "rope_theta": 10_000.0 },
        "max_position_embeddings": context,
        "tie_word_embeddings": false,
        "initializer_range": 0.02,
    });
    DecoderConfig::from_json(&config.to_string()).expect("sizes of a model")
}
