//! Qwen2: biases of queries, keys and values, and a window in the layers from
//! `max_window_layers` on.

use super::{DEFAULTS, Defaults, Family};
use crate::decoder::config::keys::{Effect, Keys, Table};
use crate::decoder::config::rope::Rotation;
use crate::decoder::config::{Biases, ConfigError, DecoderConfig};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    keys: &[WINDOWS],
    defaults: QWEN,
    rotation: Rotation::Scaled,
    read: |keys, config| {
        config.biases = Biases { qkv: true, output: false, mlp: false };
        read_windows(keys, config)
    },
};

/// Defaults of Qwen2 and its successors.
pub(super) const QWEN: Defaults = Defaults {
    vocab_size: 151_936,
    intermediate_size: 22_016,
    num_key_value_heads: Some(32),
    max_position_embeddings: 32_768,
    ..DEFAULTS
};

/// Keys that [`read_windows`] reads.
pub(super) const WINDOWS: Table = &[
    (Effect::Read, &["layer_types", "use_sliding_window", "sliding_window", "max_window_layers"]),
    (Effect::Only(&["false", "null"]), &["use_mrope"]),
];

/// Reads the windows of layers.
pub(super) fn read_windows(keys: &Keys<'_>, config: &mut DecoderConfig) -> Result<(), ConfigError> {
    let window = match keys.or("use_sliding_window", false)? {
        true => keys.or("sliding_window", Some(4096))?,
        false => None,
    };
    let first = keys.or("max_window_layers", 28)?;
    config.set_windows(keys, window, |index, _| window.is_some() && index >= first)
}
