//! The layers of `hsdp_models::nn`: values, gradients, bits and refusals.

mod composed;
mod embedding;
mod freed;
mod golden;
mod layers;
mod refusals;
mod shapes;
mod threads;
