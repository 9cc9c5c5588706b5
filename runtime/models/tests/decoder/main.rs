//! Decoders on meshes: against runs of transformers, against stock candle on whole parameters, and
//! with adapters.

mod adapters;
mod batches;
mod dtypes;
mod exports;
mod folders;
mod golden;
mod odd;
mod run;
mod stock;
mod variants;
