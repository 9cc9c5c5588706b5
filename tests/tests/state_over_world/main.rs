//! Replicas that divide the state of optimizers among them, beside replicas that each hold all of
//! it: the same bits, the planned bytes, and gathers of slices that outlast aborted steps.

mod aborted;
mod bits;
mod checkpoints;
mod frozen;
mod half_updated;
mod measured;
mod training;
