//! Traces of steps: timelines beside the shares of a step, and Chakra's files beside its published schema and beside the simulator's times.

mod case;
mod chakra;
mod replay;
mod timeline;
mod wire;
