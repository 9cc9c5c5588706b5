//! Rows 6 to 9: a world that cannot come to be, and meshes that make no sense.

use std::sync::mpsc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use hsdp::{Mesh, ModelOptions, Rank, World, WorldOptions};
use hsdp_comm::CallError::BadRank;
use hsdp_comm::SetupError::{Incomplete, WorldSize};
use hsdp_comm::{Channel, Error, Op, Rendezvous, Tag};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{DEADLINE, mesh};

use crate::runner::{Happened, LIMIT};

pub(crate) fn missing() -> Happened {
    let deadline = Duration::from_millis(200);
    let started = Instant::now();
    let ends = joined(3, deadline, &[(0, 3), (1, 3)]);
    let took = started.elapsed();
    let error = common_error(ends);
    let Error::Setup(Incomplete { missing, arrived, .. }) = &error else { panic!("{error}") };
    assert_eq!((missing.as_slice(), arrived.as_slice()), ([2].as_slice(), [0, 1].as_slice()));
    assert!(took >= deadline, "told after {took:?}");
    Happened::in_time(&error, took - deadline)
}

pub(crate) fn claimed_twice() -> Happened {
    let rendezvous = Rendezvous::new(2, patient());
    let (says, hears) = mpsc::channel();
    thread::scope(|scope| {
        let started = Instant::now();
        for name in ["one", "another"] {
            let says = says.clone();
            let rendezvous = &rendezvous;
            let claim = move || {
                let _ = says.send(rendezvous.join(Rank::new(0), 2));
            };
            Builder::new().name(name.to_owned()).spawn_scoped(scope, claim).expect("a thread");
        }
        // Nobody else has come: who hears something now is refused.
        let refused = hears.recv_timeout(LIMIT).expect("at once").expect_err("only one has it");
        let took = started.elapsed();
        let said = refused.to_string();
        assert!(
            ["one", "another"].iter().all(|name| said.contains(&format!("`{name}`"))),
            "{said}"
        );
        // The other has noticed nothing.
        let second = rendezvous.join(Rank::new(1), 2).expect("a world");
        let first = hears.recv().expect("the other claimant").expect("a world");
        let [first, second] = [first, second]
            .map(|world| world.world_group(Channel::User).barrier(Tag::default()).expect("issued"));
        first.wait().and(second.wait()).expect("both are there");
        Happened::in_time(&refused, took)
    })
}

pub(crate) fn other_size() -> Happened {
    let started = Instant::now();
    let ends = joined(3, DEADLINE, &[(0, 3), (1, 4), (2, 3)]);
    let took = started.elapsed();
    let error = common_error(ends);
    let Error::Setup(WorldSize { rank, size: 3, told: 4 }) = &error else { panic!("{error}") };
    assert_eq!(*rank, Rank::new(1));
    Happened::in_time(&error, took)
}

pub(crate) fn impossible() -> Happened {
    let started = Instant::now();
    let rendezvous = Rendezvous::new(4, patient());
    for refused in [rendezvous.join(Rank::new(4), 4), World::counting(4, Rank::new(4))] {
        let error = refused.expect_err("ranks are 0 to 3");
        assert!(matches!(error, Error::Call(BadRank { size: 4, .. })), "{error}");
    }
    let no_mesh = Mesh::new(0, 4).expect_err("no rank has a place").to_string();
    assert!(no_mesh.contains('0') && no_mesh.contains('4'), "{no_mesh}");
    let mut told = None;
    for world in World::local(4, patient()) {
        let options = ModelOptions::on(mesh(2, 3));
        let refused = springs::model(world.clone(), &options);
        told = Some(refused.expect_err("the world has 4 ranks"));
        let calls = |channel| Op::ALL.map(|op| world.ledger().op(channel, op).calls);
        assert_eq!(calls(Channel::Control), Op::ALL.map(|_| 0), "nothing was issued");
    }
    Happened::in_time(&told.expect("there are ranks"), started.elapsed())
}

/// What threads get that come together, each as a rank of a world of which it was told a size.
fn joined(size: usize, deadline: Duration, claims: &[(usize, usize)]) -> Vec<Result<World, Error>> {
    let rendezvous = Rendezvous::new(size, WorldOptions { deadline, ..WorldOptions::default() });
    thread::scope(|scope| {
        let join = |(rank, told): &(usize, usize)| {
            let rendezvous = &rendezvous;
            let rank = Rank::new(*rank);
            let told = *told;
            scope.spawn(move || rendezvous.join(rank, told))
        };
        let threads: Vec<_> = claims.iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    })
}

fn common_error(ends: Vec<Result<World, Error>>) -> Error {
    let mut errors = ends.into_iter().map(|end| end.expect_err("nobody gets a world"));
    let first = errors.next().expect("somebody came");
    for other in errors {
        assert_eq!(other, first);
    }
    first
}

fn patient() -> WorldOptions {
    WorldOptions { deadline: DEADLINE, ..WorldOptions::default() }
}
