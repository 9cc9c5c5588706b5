//! Qwen3: norms of queries and keys by head.

use super::qwen2::{QWEN, WINDOWS, read_windows};
use super::{Defaults, Family};
use crate::decoder::config::keys::Effect;
use crate::decoder::config::rope::Rotation;
use crate::decoder::config::{Biases, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    keys: &[WINDOWS, &[(Effect::Read, &["attention_bias"])]],
    defaults: Defaults { head_dim: Some(128), ..QWEN },
    rotation: Rotation::Scaled,
    read: |keys, config| {
        let biased = keys.or("attention_bias", false)?;
        config.biases = Biases { qkv: biased, output: biased, mlp: false };
        config.qk_norm = Some(QkNorm::EachHead);
        read_windows(keys, config)
    },
};
