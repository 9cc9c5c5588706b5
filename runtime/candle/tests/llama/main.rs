//! Llama on meshes: against runs of transformers, against stock candle on whole parameters, and with adapters.

mod batches;
mod golden;
mod run;
mod stock;
mod variants;
