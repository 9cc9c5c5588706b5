//! Decoders of several families, in candle's usual style: modules whose constructors take a
//! `VarBuilder`. The names of parameters and the sizes are those of Hugging Face, so folders of
//! `transformers` can be trained as they are.
//!
//! `model_type` of `config.json` chooses the family. A family is a static in `families`, which
//! reads its keys and chooses the parts of the model. The modules read these parts alone.
//!
//! | family (`model_type`) | parts beside those of Llama |
//! |---|---|
//! | `llama` | scaled position embeddings (`linear`, `llama3`), biases |
//! | `mistral` | a window of attention in all layers |
//! | `qwen2` | biases of queries, keys and values; a window from a layer on |
//! | `qwen3` | norms of queries and keys by head; a window as in `qwen2` |
//! | `gemma2` | four norms by 1 + w, GELU, a scaled embedding, caps, windows every other layer |
//! | `phi3` | packed weights; a window in all layers; a part of a head rotated |
//! | `olmo2` | norms behind attention and MLP, and norms of queries and keys over all heads |
//! | `smollm3` | layers without position embeddings, which may have a window |
//!
//! The model runs unit by unit on [`Units`](hsdp_candle::Units): sharded on a
//! [`Pass`](hsdp_candle::Pass), or whole on [`Plain`](hsdp_candle::Plain). Each unit makes its
//! modules inside, from the parameters that are gathered for it.
//!
//! | unit | parameters |
//! |---|---|
//! | `model.embed_tokens` | the embedding; kept if the head reads it too (tied weights) |
//! | `model.layers.N` | block *N* |
//! | `root` | `model.norm`, and `lm_head` if it has a weight of its own |
//!
//! In reading order: `model` (the units), `block` (with its MLP), `attention`, `layers` (linear
//! ones with the adapters of LoRA, norms, rotary embeddings), `config`, `config::keys` (the effect
//! of each key of `config.json`), `families`, `pretrained` (reads a folder of transformers),
//! `export` (writes one after training).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use hsdp::prelude::*;
//! use hsdp_candle::Pass;
//! use hsdp_models::decoder::{Decoder, DecoderConfig};
//!
//! let config = r#"{ "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
//!     "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
//!     "num_key_value_heads": 2 }"#;
//! let decoder = Decoder::new(DecoderConfig::from_json(config)?);
//! let recorded = decoder.recorded()?;
//! let train = |world: World| -> Result<f64, hsdp_candle::Error> {
//!     let options = ModelOptions::on(Mesh::new(2, 2)?);
//!     let mut model = ShardedModel::new(world, decoder.spec()?, options, recorded.init(1))?;
//!     let tokens = Tensor::new(&[[3_u32, 1, 4, 1]], &Device::Cpu)?;
//!     let labels = Tensor::new(&[[1_i64, 4, 1, -100]], &Device::Cpu)?;
//!     let mut step = model.begin_step(StepOptions::microbatches(1))?;
//!     let pass = Pass::new(step.microbatch()?)?;
//!     let loss = decoder.loss(&pass, &tokens, &labels)?;
//!     pass.backward_sum(&loss.sum, loss.count)?;
//!     Ok(step.finish()?.loss())
//! };
//! for loss in hsdp::launch(4, WorldOptions::default(), train) {
//!     assert!((loss? - 32_f64.ln()).abs() < 0.1); // it knows nothing yet
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attention;
mod block;
mod config;
#[cfg(feature = "data")]
mod export;
mod families;
mod layers;
mod model;
mod pretrained;

pub use self::attention::Attention;
pub use self::block::{Block, Embedding, LmHead, Mlp};
pub use self::config::rope::{Rope, RopeScaling};
pub use self::config::{
    Activation, Biases, BlockNorms, DecoderConfig, DecoderConfigError, Layer, NormScale, Packing,
    QkNorm,
};
#[cfg(feature = "data")]
pub use self::export::{Export, ExportError};
pub use self::layers::{Linear, Lora, RmsNorm, Rotary};
pub use self::model::{Decoder, Recomputation};
pub use self::pretrained::{Pretrained, PretrainedError};
