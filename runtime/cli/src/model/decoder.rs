//! Reads decoders of transformers from the text of their `config.json`.

use hsdp_models::decoder::{Decoder, DecoderConfig, Lora};
use hsdp_simulator::{Attention, Scores};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::{Adapters, Model};

/// Keys that distinguish a `config.json` from a model of `PLAN.md`.
#[derive(Deserialize)]
struct Keys {
    model_type: Option<IgnoredAny>,
    units: Option<IgnoredAny>,
}

/// Returns whether a text is a `config.json`, and no model of `PLAN.md`. Both readers refuse a text
/// that is no JSON.
pub(super) fn is_config(text: &str) -> bool {
    match serde_json::from_str::<Keys>(text) {
        Ok(Keys { model_type, units }) => model_type.is_some() && units.is_none(),
        Err(_) => text.contains("\"model_type\"") && !text.contains("\"units\""),
    }
}

/// Reads a model of the families of `hsdp-models`, with the units and names that it has in
/// training.
///
/// # Errors
/// A text of one line, with the key.
pub(super) fn read(text: &str, adapters: Option<Adapters>) -> Result<Model, String> {
    let config = DecoderConfig::from_json(text).map_err(|error| error.to_string())?;
    let decoder = adapted(Decoder::new(config), adapters);
    let spec = decoder.spec().map_err(|error| error.to_string())?;
    let config = decoder.config();
    let attentions = config.layers.iter().map(|layer| Attention {
        heads: config.num_attention_heads,
        size: config.head_dim,
        scores: layer.window.map_or(Scores::Fused, Scores::Window),
    });
    let mut model = Model::by_names(spec, attentions);
    model.most_tokens = Some(config.max_position_embeddings);
    if config.tie_word_embeddings {
        // The head reads the embedding, the only lookup.
        model.again = model.lookups.iter().cloned().collect();
    }
    Ok(model)
}

fn adapted(decoder: Decoder, adapters: Option<Adapters>) -> Decoder {
    let Some(Adapters { rank, frozen_in }) = adapters else { return decoder };
    let decoder = decoder.with_lora(Lora::of_rank(rank));
    match frozen_in {
        Some(dtype) => decoder.storing_frozen_in(dtype),
        None => decoder,
    }
}
