//! Models in candle's graph: the parameters that constructors declare, passes over units, their
//! gradients, and collectives of the program's own.

mod across_models;
mod buffers;
mod check_backward;
mod common;
mod distributed;
mod errors;
mod evaluation;
mod layers;
mod llama;
mod lost_gradients;
mod order;
mod parity;
mod recomputed;
mod recorded;
mod seeds;
mod several_dtypes;
mod several_inputs;
mod sharing;
mod var_builder;
mod variables;
