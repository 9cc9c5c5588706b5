//! Layers and models for [`hsdp_candle`], the candle adapter of [hsdp].
//!
//! - [`nn`] has layers of transformers with gradients, which candle-nn's fused layers cut.
//! - [`decoder`] trains folders of transformers as they are: Llama, Qwen, Gemma and others.
//! - [`gpt`] is a small GPT, for benchmarks and conformance cases.
//! - [`text`] makes tokens and windows of a text.
//! - `data` reads texts and sequences to train on, with the tokenizer of a folder, and
//!   `decoder::Export` writes such a folder: with the feature `data`, which is on by default.
//!
//! Models run on [`Units`](hsdp_candle::Units): sharded on a [`Pass`](hsdp_candle::Pass), or whole
//! on a [`Plain`](hsdp_candle::Plain). The adapter knows none of these models: a model of your own
//! uses the same two traits.

#![forbid(unsafe_code)]

#[cfg(feature = "data")]
pub mod data;
pub mod decoder;
pub mod gpt;
pub mod nn;
pub mod text;
