//! The operations of a step that overlap: gathers beside the computation that is before them,
//! reductions and the deferred all-reduce beside the backward, gathers of slices beside the next
//! forward.
//!
//! Computation is a sleep, and collectives go over channels that are slow on purpose, so that times
//! add up or do not whatever the machine does besides. A step is asserted to take as many of these
//! units of time as follow from what waits for what.

mod gathers;
mod reductions;
mod slices;
mod timed;
