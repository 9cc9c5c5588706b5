//! Llama, in candle's usual style: modules whose constructors take a `VarBuilder`. The names of parameters and the sizes are those of
//! Hugging Face, so folders of `transformers` can be trained as they are.
//!
//! The model runs unit by unit on [`Units`](hsdp_candle::Units): sharded on a [`Pass`](hsdp_candle::Pass), or whole on [`Plain`](hsdp_candle::Plain). Each
//! unit makes its modules inside, from the parameters that are gathered for it.
//!
//! | unit | parameters |
//! |---|---|
//! | `model.embed_tokens` | the embedding; kept if the head reads it too (tied weights) |
//! | `model.layers.N` | block *N* |
//! | `root` | `model.norm`, and `lm_head` if it has a weight of its own |
//!
//! In reading order: `model` (the units), `block`, `attention`, `linear` (with the adapters of
//! LoRA), `rotary`, `config`, `keys` (what each key of `config.json` does), `pretrained` (a folder
//! of transformers).
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use hsdp::prelude::*;
//! use hsdp_candle::Pass;
//! use hsdp_models::llama::{Llama, LlamaConfig};
//!
//! let config = r#"{ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
//!     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2 }"#;
//! let llama = Llama::new(LlamaConfig::from_json(config)?);
//! let recorded = llama.recorded()?;
//! let losses = hsdp::world(4, |world| -> Result<f64, hsdp_candle::Error> {
//!     let options = ModelOptions::on(Mesh::new(2, 2)?);
//!     let mut model = ShardedModel::new(world, llama.spec()?, options, recorded.init(1))?;
//!     let tokens = Tensor::new(&[[3_u32, 1, 4, 1]], &Device::Cpu)?;
//!     let labels = Tensor::new(&[[1_i64, 4, 1, -100]], &Device::Cpu)?;
//!     let mut step = model.begin_step(StepOptions::microbatches(1))?;
//!     let pass = Pass::new(step.microbatch()?)?;
//!     let loss = llama.loss(&pass, &tokens, &labels)?;
//!     pass.backward_sum(&loss.sum, loss.count)?;
//!     Ok(step.finish()?.loss())
//! });
//! for loss in losses {
//!     assert!((loss? - 32_f64.ln()).abs() < 0.1); // it knows nothing yet
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attention;
mod block;
mod config;
mod keys;
mod linear;
mod model;
mod pretrained;
mod rotary;

pub use self::attention::Attention;
pub use self::block::{Block, Embedding, Head, Mlp, RmsNorm};
pub use self::config::{ConfigError, LlamaConfig, RopeScaling};
pub use self::linear::{Linear, Lora};
pub use self::model::{Llama, Recomputation};
pub use self::pretrained::{Pretrained, PretrainedError};
pub use self::rotary::Rotary;
