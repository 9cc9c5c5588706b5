//! Ranks as threads: started together, joined together, and none of them left waiting for one that
//! failed.

use std::fmt::{self, Display};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, Builder, Scope, ScopedJoinHandle};

use hsdp_kernels::memory;
use hsdp_sharding::Rank;
use parking_lot::Mutex;

use crate::engine::panic_message;
use crate::flight::Dump;
use crate::world::{MOST_RANKS, check_size};
use crate::{AbortReason, RankFailure, World, WorldOptions};

/// The stack of a rank's thread: an autograd recurses.
const STACK_BYTES: usize = 16 << 20;

/// Runs `size` ranks as threads named `rank-0`, `rank-1`, ..., waits until all have ended, and
/// returns the result of each, in rank order. Each of them calls `rank` once, with its own world.
///
/// The error of a rank ends the world. The other ranks get its text from the operation for which
/// they wait, in [`WorldError::Aborted`](crate::WorldError), and do not wait for the rank.
/// A panic of a rank does the same with its message, as soon as the panic's hook has run, and the
/// result of the rank is a [`RankFailure`] as an `E`. The others get no separate error for the step
/// that the panic aborts. A rank that returns a value while others wait for it has left, which ends
/// the world, too.
///
/// Ranks that cannot fail return `Ok::<_, RankFailure>(..)`.
///
/// If the world ended early and [`WorldOptions::flight_dir`] is set, each rank writes its flight
/// record there, when its closure has ended or when all closures have.
///
/// Memory is counted for each of the first [`memory::MAX_RANKS`] ranks separately. As in
/// [`World::local`], there are at most 4096 ranks. If `size` is more, the result is one failure, of
/// the first rank beyond. No rank begins if a world of `size` [cannot have](WorldOptions::check)
/// the options: each fails with that error. A rank whose thread cannot be started fails, too.
///
/// ```
/// use hsdp_comm::{Channel, Error, Reduction, Tag, World, WorldOptions, launch};
///
/// fn sum(world: World) -> Result<Vec<u64>, Error> {
///     let group = world.world_group(Channel::User);
///     let mine = vec![world.rank().index() as u64];
///     group.all_reduce(Tag::default(), Reduction::Sum, mine)?.wait()
/// }
///
/// for sum in launch(4, WorldOptions::default(), sum) {
///     assert_eq!(sum?, [0 + 1 + 2 + 3]);
/// }
/// # Ok::<(), Error>(())
/// ```
///
/// ```
/// use hsdp_comm::{Channel, Tag, World, WorldOptions, launch};
///
/// fn read(world: World) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     if world.rank().index() == 1 {
///         return Err("the tokens cannot be read".into());
///     }
///     Ok(world.world_group(Channel::User).barrier(Tag::default())?.wait()?)
/// }
///
/// let ends = launch(2, WorldOptions::default(), read);
/// let told = ends[0].as_ref().expect_err("rank 1 has failed").to_string();
/// assert!(told.contains("rank 1") && told.contains("the tokens cannot be read"), "{told}");
/// ```
pub fn launch<T, E>(
    size: usize,
    options: WorldOptions,
    rank: impl Fn(World) -> Result<T, E> + Sync,
) -> Vec<Result<T, E>>
where
    T: Send,
    E: Display + From<RankFailure> + Send,
{
    let results = Mutex::new(Vec::new());
    let ends = launch_all(size, options, &|world: World| {
        let index = world.rank().index();
        let result = run_told(world, &rank);
        put(&mut results.lock(), index, result);
    });
    let mut results = results.into_inner().into_iter();
    let mut returned = Vec::with_capacity(ends.len());
    for end in ends {
        let result = results.next().flatten();
        returned.push(match end {
            Ok(()) => result.expect("a rank that has returned has a result"),
            Err(failure) => Err(failure.into()),
        });
    }
    returned
}

/// Runs a rank. Its error ends the world with its text.
fn run_told<T, E: Display>(world: World, rank: impl FnOnce(World) -> Result<T, E>) -> Result<T, E> {
    let telling = world.clone();
    rank(world).inspect_err(|error| telling.abort(&error.to_string()))
}

/// Puts the result of a rank at its index, whichever rank returns first.
fn put<T>(results: &mut Vec<Option<T>>, index: usize, result: T) {
    while results.len() <= index {
        results.push(None);
    }
    results[index] = Some(result);
}

/// The part of [`launch`] that does not depend on the types of a result. It is compiled once, not
/// for each caller.
fn launch_all(
    size: usize,
    options: WorldOptions,
    rank: &(dyn Fn(World) + Sync),
) -> Vec<Result<(), RankFailure>> {
    if let Err(error) = check_size(size) {
        let rank = Rank::new(MOST_RANKS);
        let message = error.to_string().into();
        return vec![Err(RankFailure { rank, message })];
    }
    if let Err(error) = options.check(size) {
        let message: Arc<str> = error.to_string().into();
        let refused = |rank| RankFailure { rank: Rank::new(rank), message: Arc::clone(&message) };
        return (0..size).map(|rank| Err(refused(rank))).collect();
    }
    let folder = options.flight_dir.as_deref().map(Arc::from);
    let worlds = World::local(size, options);
    let dump = |world: &World| Dump::of(world.handle(), folder.clone());
    let dumps: Vec<_> = worlds.iter().map(dump).collect();
    let ends = thread::scope(|scope| {
        let start = |(world, dump)| start(scope, world, dump, rank);
        // All start before the first is joined.
        let started: Vec<_> = worlds.into_iter().zip(&dumps).map(start).collect();
        let started = started.into_iter().enumerate();
        started.map(|(rank, thread)| join(Rank::new(rank), thread)).collect()
    });
    // Some may have been gone before the world ended.
    dumps.iter().for_each(Dump::if_ended);
    ends
}

/// Runs one rank on this thread, as [`launch`] does on one of its own: the others are elsewhere.
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) fn run_one<T, E: Display + From<RankFailure>>(
    world: World,
    options: &WorldOptions,
    rank: impl FnOnce(World) -> Result<T, E>,
) -> Result<T, E> {
    let own = world.rank();
    let dump = Dump::of(world.handle(), options.flight_dir.as_deref().map(Arc::from));
    run_caught(world, &dump, |world| run_told(world, rank))
        .unwrap_or_else(|message| Err(RankFailure { rank: own, message }.into()))
}

type Started<'scope> = io::Result<ScopedJoinHandle<'scope, Result<(), Arc<str>>>>;

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    world: World,
    dump: &'scope Dump,
    rank: &'scope (dyn Fn(World) + Sync),
) -> Started<'scope> {
    let builder = Builder::new().name(format!("rank-{}", world.rank())).stack_size(STACK_BYTES);
    builder.spawn_scoped(scope, move || run_caught(world, dump, rank))
}

/// One rank, from its first line to the moment from which others must not wait for it.
fn run_caught<T>(world: World, dump: &Dump, rank: impl FnOnce(World) -> T) -> Result<T, Arc<str>> {
    let handle = Arc::clone(world.handle());
    let _ = handle.watched.set(thread::current().id());
    let returned = catch_unwind(AssertUnwindSafe(|| {
        memory::set_rank(world.rank());
        rank(world)
    }));
    let returned = returned.map_err(|panic| {
        let message = panic_message(&*panic);
        handle.abort(AbortReason::Panicked { message: Arc::clone(&message) });
        message
    });
    handle.leave();
    dump.if_ended();
    returned
}

fn join(rank: Rank, thread: Started<'_>) -> Result<(), RankFailure> {
    let failed = |message| RankFailure { rank, message };
    match thread.map(ScopedJoinHandle::join) {
        Ok(Ok(returned)) => returned.map_err(failed),
        Ok(Err(panic)) => Err(failed(panic_message(&*panic))),
        Err(error) => Err(failed(format!("its thread could not be started: {error}").into())),
    }
}

impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.size())
    }
}

#[cfg(test)]
mod tests;
