//! SmolLM3: layers without position embeddings, which may have a window.

use super::{DEFAULTS, Defaults, Family};
use crate::decoder::config::keys::{Effect, Keys};
use crate::decoder::config::rope::Rotation;
use crate::decoder::config::{Biases, ConfigError, DecoderConfig, wrong};

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    keys: &[&[
        (
            Effect::Read,
            &[
                "attention_bias",
                "mlp_bias",
                "no_rope_layers",
                "no_rope_layer_interval",
                "use_sliding_window",
                "sliding_window",
                "layer_types",
            ],
        ),
        // transformers ignores these keys.
        (Effect::None, &["max_window_layers", "pretraining_tp"]),
    ]],
    defaults: Defaults {
        vocab_size: 128_256,
        hidden_size: 2048,
        num_hidden_layers: 36,
        num_attention_heads: 16,
        num_key_value_heads: Some(4),
        max_position_embeddings: 32_768,
        rope_theta: 2_000_000.0,
        tie_word_embeddings: true,
        pad_token_id: Some(128_004),
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let of_attention = keys.or("attention_bias", false)?;
        let of_mlp = keys.or("mlp_bias", false)?;
        config.biases = Biases { qkv: of_attention, output: of_attention, mlp: of_mlp };
        read_rope(keys, config)?;
        let window = match keys.or("use_sliding_window", false)? {
            true => keys.optional("sliding_window")?,
            false => None,
        };
        config.set_windows(keys, window, |_, layer| window.is_some() && !layer.rope)
    },
};

/// Reads the layers that have position embeddings.
fn read_rope(keys: &Keys<'_>, config: &mut DecoderConfig) -> Result<(), ConfigError> {
    let interval: usize = keys.or("no_rope_layer_interval", 4)?;
    let has_rope: Vec<bool> = match keys.optional::<Vec<usize>>("no_rope_layers")? {
        Some(stated) => stated.into_iter().map(|has| has != 0).collect(),
        None if interval == 0 => {
            return wrong("no_rope_layer_interval", interval, "above 0".to_owned());
        }
        None => (1..=config.layers.len()).map(|layer| !layer.is_multiple_of(interval)).collect(),
    };
    // transformers ignores entries beyond the layers.
    if has_rope.len() < config.layers.len() {
        return Err(ConfigError::Contradiction {
            first: format!("num_hidden_layers is {}", config.layers.len()),
            second: format!("no_rope_layers has {} entries", has_rope.len()),
        });
    }
    config.layers.iter_mut().zip(has_rope).for_each(|(layer, has_rope)| layer.rope = has_rope);
    Ok(())
}
