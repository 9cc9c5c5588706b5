//! Collectives in candle's graph: their gradients, and the order in which they come.

mod golden;
mod seat;
