//! Collectives in candle's graph: their gradients, and the order in which they come.

mod bits;
mod functions;
mod integers;
mod member;
mod meshes;
mod order;
mod refusals;
mod rows;
mod statistics;
mod towers;
