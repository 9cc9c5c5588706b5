//! Layers and models for [`hsdp_candle`], the candle adapter of [hsdp].
//!
//! - [`nn`] has layers of transformers with gradients, which candle-nn's fused layers cut.
//! - [`llama`] trains folders of transformers as they are.
//! - [`gpt`] is a small GPT, for benchmarks and conformance cases.
//!
//! Models run on [`Units`](hsdp_candle::Units): sharded on a [`Pass`](hsdp_candle::Pass), or whole on
//! a [`Plain`](hsdp_candle::Plain). Nothing here is known to the adapter: a model of your own uses the
//! same two traits.

#![forbid(unsafe_code)]

pub mod gpt;
pub mod llama;
pub mod nn;
