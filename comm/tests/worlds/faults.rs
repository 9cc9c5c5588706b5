//! Faults that are injected: what every rank gets, and that it gets it in time. One test a kind.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::common::outcomes;
use hsdp_comm::{
    Channel, Error, Fault, FaultKind, FaultPlace, Pending, RankFailure, Reduction, Stage, Tag,
    World, WorldOptions,
};
use hsdp_sharding::{Rank, UnitId};

mod counting;
mod descriptors;
mod ending;
mod non_finite;
mod order;
mod refused;
mod waiting;

/// Within which every rank ends: a second, and what a busy machine adds.
const PROMPTLY: Duration = Duration::from_secs(5);

/// Every test's fault is one of rank 1.
const CULPRIT: Rank = Rank::new(1);

type Outcomes<T> = Vec<Result<T, RankFailure>>;

fn options(faults: impl IntoIterator<Item = Fault>) -> WorldOptions {
    WorldOptions { faults: faults.into_iter().collect(), ..WorldOptions::default() }
}

/// The results of the three ranks of a world, all of which return promptly.
fn promptly<T: Send + 'static>(
    options: WorldOptions,
    rank: impl Fn(World) -> T + Send + Sync + 'static,
) -> Outcomes<T> {
    let (over, ended) = mpsc::channel();
    thread::spawn(move || over.send(outcomes(3, options, rank)));
    ended.recv_timeout(PROMPTLY).expect("every rank ends promptly")
}

/// Runs `steps` with one fault in step 1.
fn steps_with(place: impl Into<FaultPlace>, kind: FaultKind) -> Outcomes<Result<f32, Error>> {
    promptly(options([Fault::at(CULPRIT, 1, place, kind)]), |world| steps(&world))
}

/// Three steps. In each the units 0 and 1 are gathered, then the units 1 and 0 are reduced: calls 0 to 3.
fn steps(world: &World) -> Result<f32, Error> {
    let mut sum = 0.0;
    for step in 0..3 {
        world.set_step(step);
        let zero = gather(world, 0)?;
        let one = gather(world, 1)?;
        zero.wait()?;
        one.wait()?;
        let one = reduce(world, 1)?;
        let zero = reduce(world, 0)?;
        sum += one.wait()?[0] + zero.wait()?[0];
    }
    Ok(sum)
}

/// The results of `steps` without a fault.
const SUM: f32 = 3.0 * 2.0 * 3.0;

fn tag(stage: Stage, unit: usize) -> Tag {
    Tag::new(stage).unit(UnitId::new(unit))
}

fn gather(world: &World, unit: usize) -> Result<Pending<Vec<f32>>, Error> {
    world.world_group(Channel::Gather).all_gather(tag(Stage::Gather, unit), vec![1.0; 4])
}

fn reduce(world: &World, unit: usize) -> Result<Pending<Vec<f32>>, Error> {
    let group = world.world_group(Channel::Reduce);
    group.all_reduce(tag(Stage::Reduce, unit), Reduction::Sum, vec![1.0; 5])
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued?.wait()
}

/// The one error of all ranks, as text.
fn common_end<T: std::fmt::Debug>(outcomes: Outcomes<Result<T, Error>>) -> String {
    let ends = outcomes.into_iter().map(|end| end.expect("no panic").expect_err("it ends early"));
    let ends: Vec<Error> = ends.collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "all ranks get one error: {ends:?}");
    ends[0].to_string()
}

/// The error of the culprit, and that of all others.
fn apart<T: std::fmt::Debug>(outcomes: Outcomes<Result<T, Error>>) -> (Error, String) {
    let mut outcomes = outcomes;
    let own = outcomes.remove(CULPRIT.index()).expect("no panic").expect_err("it fails");
    (own, common_end(outcomes))
}

#[track_caller]
fn assert_names(text: &str, expected: &[&str]) {
    for expected in expected {
        assert!(text.contains(expected), "`{expected}` is missing in:\n{text}");
    }
}
