//! Rows 49, 51 and 52: threads that must all end, a process that is stopped for a while, and one
//! that forks.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use hsdp::{ModelSpec, Rank, World, WorldOptions};
use hsdp_comm::CallError::Forked;
use hsdp_comm::WorldError::Aborted;
use hsdp_comm::{AbortReason, Channel, Error as CommError, Rendezvous, Tag};
use hsdp_tests::support::models::layer;

use crate::children;
use crate::runner::{Happened, LIMIT, becomes, pause};
use crate::training::{At, CULPRIT, FAULTY, Go, SURVIVORS, Training};

/// Threads of this process, where that can be known.
fn threads() -> Option<usize> {
    Some(fs::read_dir("/proc/self/task").ok()?.count())
}

pub(crate) fn panic_leaves_no_thread() -> Happened {
    children::plays("panicking")
}

/// In a process of its own, where nobody else starts threads: workers are started too, since
/// gradients are large.
pub(crate) fn panic_in_a_thread() -> Happened {
    let before = threads();
    let panics = |world: &World, at, step| {
        let now = (world.rank().index(), at, step) == (CULPRIT, At::Batch(1), FAULTY);
        if now { panic!("an index is out of bounds") } else { Ok(Go::On) }
    };
    let spec = ModelSpec::new().unit(layer("first", [150, 200])).unit(layer("second", [200, 150]));
    let training = Training { spec, user: &panics, ..Training::new() };
    let run = training.run();
    let (error, happened) = run.told(&SURVIVORS);
    let hsdp::Error::Comm(CommError::World(Aborted { reason, .. })) = error else {
        panic!("{error}")
    };
    assert!(matches!(reason, AbortReason::Panicked { .. }), "{reason}");
    let joined = Instant::now();
    let waited = || threads() == before;
    assert!(becomes(waited) && joined.elapsed() < LIMIT, "{:?} of {before:?} threads", threads());
    happened
}

/// How long a rank waits in the process that is stopped, and for how long that is.
const PATIENCE: Duration = Duration::from_secs(1);
const STOPPED: Duration = Duration::from_millis(2500);

/// A training that goes on for longer than it takes to stop it. Rank 0 is slow, so that the others
/// always wait.
pub(crate) fn train_slowly() -> Happened {
    let slow = |world: &World, at, step| {
        if (world.rank().index(), at) == (0, At::Start) {
            if step == FAULTY {
                children::say("under way");
            }
            pause(Duration::from_millis(10));
        }
        Ok(Go::On)
    };
    let new = Training::new();
    let world = WorldOptions { deadline: PATIENCE, ..new.world.clone() };
    let training = Training { world, user: &slow, steps: 60, ..new };
    let started = Instant::now();
    let run = training.run();
    let took = started.elapsed();
    for rank in crate::training::ALL {
        let told = &run.fared(rank).told;
        assert!(told.is_empty(), "rank {rank} is told {}", told[0].0);
    }
    let undisturbed = Training { steps: 60, ..Training::new() }.run();
    run.assert_same_as(&undisturbed);
    Happened::after(&"nothing: all steps are made, with the same bits", took)
}

/// Two ranks that come together in the process that is stopped. The second one takes its time, and
/// that is not over when the process goes on.
pub(crate) fn come_slowly() -> Happened {
    let started = Instant::now();
    let options = WorldOptions { deadline: PATIENCE, ..WorldOptions::default() };
    let rendezvous = Rendezvous::new(2, options);
    let come = |rank| rendezvous.join(Rank::new(rank), 2).map(drop);
    let came = thread::scope(|scope| {
        let second = scope.spawn(|| {
            let first_has_come = || format!("{rendezvous:?}").contains("missing: 1");
            assert!(becomes(first_has_come), "{rendezvous:?}");
            children::say("under way");
            (0..40).for_each(|_| pause(Duration::from_millis(10)));
            come(1)
        });
        [come(0), second.join().expect("no panic")]
    });
    assert_eq!(came, [Ok(()), Ok(())]);
    Happened::after(&"nothing: both have come", started.elapsed())
}

pub(crate) fn stopped_and_continued() -> Happened {
    let coming = stopped_while("stopped_while_coming");
    assert_eq!(coming.told, "nothing: both have come");
    stopped_while("stopped")
}

fn stopped_while(role: &str) -> Happened {
    use std::io::BufRead as _;

    use nix::sys::signal::{Signal, kill};

    let (child, mut said) = children::start(role);
    let mut line = String::new();
    said.read_line(&mut line).expect("it can be read");
    assert_eq!(line, "under way\n");
    kill(child.id(), Signal::SIGSTOP).expect("it is ours");
    pause(STOPPED);
    kill(child.id(), Signal::SIGCONT).expect("it is ours");
    let happened = children::ended(child, said);
    assert!(happened.took > STOPPED, "it was not stopped: {:?}", happened.took);
    happened
}

pub(crate) fn forked() -> Happened {
    children::plays("forking")
}

/// Forks while there is a world and no other thread. What the fork calls is an error, and the world
/// goes on.
pub(crate) fn fork_after_init() -> Happened {
    use std::process;

    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    let started = Instant::now();
    let worlds = World::local(2, WorldOptions::default());
    let groups = [0, 1].map(|rank| worlds[rank].world_group(Channel::User));
    let meet = || {
        let pending = [0, 1].map(|rank| groups[rank].barrier(Tag::default()));
        pending.into_iter().try_for_each(|pending| pending?.wait())
    };
    meet().expect("both are there");
    assert!(threads().is_none_or(|count| count == 1), "{:?} threads", threads());
    // SAFETY: T-1, this is the process's only thread.
    let forked = unsafe { fork() }.expect("a fork");
    match forked {
        ForkResult::Child => {
            let refused = groups[0].barrier(Tag::default()).map(drop);
            let is_forked = matches!(&refused, Err(CommError::Call(Forked { .. })));
            children::say(&format!("refused: {refused:?}"));
            if let Err(error) = refused {
                children::say(&format!("told: {} {error}", started.elapsed().as_micros()));
            }
            process::exit(i32::from(!is_forked));
        }
        ForkResult::Parent { child } => {
            let ended = waitpid(child, None).expect("it is ours");
            assert_eq!(ended, WaitStatus::Exited(child, 0), "the fork is refused");
            meet().expect("the world has noticed nothing");
        }
    }
    // The fork has said what it was told.
    Happened::after(&"the world has noticed nothing", started.elapsed())
}
