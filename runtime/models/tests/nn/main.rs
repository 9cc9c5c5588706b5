//! The layers of `hsdp_models::nn`: values, gradients, bits and refusals. Also the GPT that is made
//! of them, and models of candle-transformers, which has layers without a backward.

// One config of `stock_models` has the keys of all models.
#![recursion_limit = "512"]

mod attention;
mod batch_norm;
#[path = "../../../candle/tests/graph/common.rs"]
mod common;
mod composed;
mod cut;
mod embedding;
mod freed;
mod golden;
mod layers;
mod linear;
mod refusals;
mod shapes;
mod sharded;
mod stock_models;
mod threads;
