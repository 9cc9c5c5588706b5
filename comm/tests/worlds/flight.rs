//! The flight recorder in worlds: what it notes, what is written, and what a set of records says.

use std::time::{Duration, Instant};

use hsdp_comm::{
    Channel, Error, FlightEntry, FlightRecord, FlightState, Group, Pending, Reduction, Stage, Tag,
    World,
};
use hsdp_sharding::UnitId;

mod dumping;
mod explaining;
mod losses;
mod recording;

/// Of unit `unit`, in step 7.
fn tag(stage: Stage, unit: usize) -> Tag {
    Tag::new(stage).unit(UnitId::new(unit)).step(7)
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<(), Error> {
    issued?.wait().map(drop)
}

/// The gather of a unit.
fn gather(world: &World, unit: usize) -> Result<(), Error> {
    settled(reducer(world).all_gather(tag(Stage::Gather, unit), vec![1_f32; 4]))
}

/// The reduction of a unit.
fn reduce(world: &World, unit: usize) -> Result<(), Error> {
    let values = vec![1_f32; 4 * world.size()];
    settled(reducer(world).reduce_scatter(tag(Stage::Reduce, unit), Reduction::Sum, values))
}

/// All of these tests' operations are of one sequence, unless they say otherwise.
fn reducer(world: &World) -> Group {
    world.world_group(Channel::Reduce)
}

fn states(record: &FlightRecord) -> Vec<FlightState> {
    record.entries.iter().map(|entry| entry.state).collect()
}

fn last(record: &FlightRecord) -> &FlightEntry {
    record.entries.last().expect("there are entries")
}

/// Waits until `done`, for a minute at most.
fn until(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what} never came");
        std::thread::yield_now();
    }
}

/// Passes some time.
fn pass(time: Duration) {
    let started = Instant::now();
    until("the time", || started.elapsed() >= time);
}
