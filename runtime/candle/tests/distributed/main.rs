//! Collectives in candle's graph: their gradients, and the order in which they come.

mod functions;
mod golden;
mod integers;
mod meshes;
mod order;
mod refusals;
mod rows;
mod seat;
mod statistics;
mod towers;
