//! The early ends: deadlines, panics, ranks that leave, steps and worlds that are given up.

use std::time::Duration;

use hsdp_comm::{Channel, Error, Pending, Reduction, Stage, Tag, World};

mod deadlines;
mod errors;
mod late;
mod leaving;
mod mistakes;
mod panics;
mod steps;
mod worlds;

/// The time within which all ranks know of a fault: a second, and what a busy machine adds. The deadline is 120 s.
const PROMPTLY: Duration = Duration::from_secs(5);

fn tag() -> Tag {
    Tag::new(Stage::AllReduce).step(7)
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued?.wait()
}

fn sum(world: &World, values: Vec<f32>) -> Result<Vec<f32>, Error> {
    settled(world.world_group(Channel::User).all_reduce(tag(), Reduction::Sum, values))
}
