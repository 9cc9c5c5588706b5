//! The layers of `hsdp_candle::nn`: values, gradients, bits and refusals.

mod composed;
mod embedding;
mod golden;
mod layers;
mod refusals;
mod shapes;
mod threads;
