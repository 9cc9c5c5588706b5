//! Threads under a model checker: each test runs a small world under thousands of schedules, and
//! says what holds in all of them. `README.md` beside the models; CONTRIBUTING.md has the command.
//!
//! In a model no time passes. So a thread that is not woken never wakes, and the model checker
//! calls that a deadlock; and an alarm whose period is 0 rings once, when its wait begins.
#![cfg(shuttle)]

use std::sync::Arc;
use std::time::Duration;

use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{
    AbortReason, Channel, Error, Group, Pending, Reduction, Tag, Workers, World, WorldOptions,
};
use hsdp_sharding::Rank;
use shuttle::thread;

mod again;
mod circles;
mod claims;
mod ends;
mod flight;
mod meeting;
mod operations;
mod parts;
mod pending;
mod schedules;
mod steps;
mod together;
mod work;

use self::schedules::{all_schedules, schedules};

/// Elements of f32 whose all-reduce workers do: more than a member does alone, in one block for
/// each member.
const LARGE: usize = 5_000;

/// Elements that the last member combines before its call returns.
const SMALL: usize = 3;

/// No alarm ever rings.
fn options(workers: usize) -> WorldOptions {
    WorldOptions {
        deadline: Duration::MAX,
        late: Duration::MAX,
        circle_grace: Duration::MAX,
        workers: Workers::Count(workers),
        flight_entries: 4,
        ..WorldOptions::default()
    }
}

/// Runs each rank as a thread, to its end: what each returned, in rank order. The caller has a
/// handle of each, so that none leaves.
fn run<T: Send + 'static>(
    worlds: &[World],
    rank: impl Fn(World) -> T + Send + Sync + 'static,
) -> Vec<T> {
    run_alone(worlds.to_vec(), rank)
}

/// The same, but each rank has no handle of its world but the one that it runs with.
fn run_alone<T: Send + 'static>(
    worlds: Vec<World>,
    rank: impl Fn(World) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let rank = Arc::new(rank);
    let start = |world| {
        let rank = Arc::clone(&rank);
        thread::spawn(move || rank(world))
    };
    let started: Vec<_> = worlds.into_iter().map(start).collect();
    started.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
}

fn settled<T>(issued: Result<Pending<T>, Error>) -> Result<T, Error> {
    issued?.wait()
}

fn user(world: &World) -> Group {
    world.world_group(Channel::User)
}

/// Issues the sum of `len` ones for each member.
fn ones(group: &Group, len: usize) -> Result<Pending<Vec<f32>>, Error> {
    group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0; len])
}

/// The result of `ones`.
fn sum_of_ones(members: u8, len: usize) -> Vec<f32> {
    vec![f32::from(members); len]
}

/// That members which all issued one operation ended alike: with its output, or all with one error.
#[track_caller]
fn assert_alike(outcomes: &[Result<Vec<f32>, Error>], sum: &[f32]) {
    let first = &outcomes[0];
    assert!(outcomes.iter().all(|outcome| outcome == first), "an operation has one end");
    assert!(first.as_ref().map_or(true, |output| output == sum), "{first:?}");
}

/// Whether a world ended because `rank` left it.
fn is_left_by(rank: usize, end: &Error) -> bool {
    let rank = Rank::new(rank);
    matches!(end, Error::World(Aborted { rank: it, reason: AbortReason::Left { .. }, .. }) if *it == rank)
}
