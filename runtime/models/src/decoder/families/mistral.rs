//! Mistral: a window in all layers.

use super::{DEFAULTS, Defaults, Family};
use crate::decoder::config::keys::Effect;
use crate::decoder::config::rope::Rotation;

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    keys: &[&[(Effect::Read, &["sliding_window"])]],
    defaults: Defaults {
        intermediate_size: 14_336,
        num_key_value_heads: Some(8),
        max_position_embeddings: 4096 * 32,
        ..DEFAULTS
    },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let window = keys.or("sliding_window", Some(4096))?;
        config.layers.iter_mut().for_each(|layer| layer.window = window);
        Ok(())
    },
};
