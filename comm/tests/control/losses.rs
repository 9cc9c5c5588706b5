//! The rank that each survivor names when the network loses or changes messages: all that is known of the fault, and no more.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::{Channel, Error, Pending, Tag, WorldOptions};
use hsdp_control::{Deadlines, Membership};

use crate::job_of;
use crate::way::{Direction, Spot, Way};
use crate::world::{World, each, quick};

const LONG: Duration = Duration::from_secs(20);

/// The time that a coordinator has for an answer. A busy machine only makes a silence longer.
const ANSWER: Duration = Duration::from_millis(500);

const BOTH: [Direction; 2] = [Direction::ToCoordinator, Direction::ToMember];

/// Members of a world, each of which connects to the coordinator through a network of its own.
fn through_ways(world: &World) -> (Vec<Way>, Vec<Membership>) {
    let ways: Vec<Way> = (0..world.size).map(|_| Way::to(world.server.address())).collect();
    let joining = (0..).zip(&ways).collect();
    let members = each(joining, |(rank, way): (u32, &Way)| way.join(world, rank));
    (ways, members)
}

/// The errors that end a job of barriers, by rank. `damage` begins when the job is running.
fn said_by_each(
    members: Vec<Membership>,
    deadline: Duration,
    damage: impl FnOnce(),
) -> Vec<String> {
    let options = WorldOptions { deadline, ..WorldOptions::default() };
    let (running, begun) = mpsc::channel();
    let run = |membership: Membership| {
        let world = job_of(membership).world(3, options.clone()).expect("a world");
        let group = world.as_ref().expect("a rank").world_group(Channel::User);
        let step = || group.barrier(Tag::default()).and_then(Pending::wait);
        (0..20).for_each(|_| step().expect("the job is running"));
        running.send(()).expect("the test waits");
        let ended: Error = loop {
            if let Err(error) = step() {
                break error;
            }
        };
        ended.to_string()
    };
    thread::scope(|scope| {
        let ranks = scope.spawn(|| each(members, run));
        (0..3).for_each(|_| begun.recv_timeout(LONG).expect("a rank is running"));
        damage();
        ranks.join().expect("no panic")
    })
}

/// A duration in the words of an error.
fn duration(said: &str) -> Duration {
    let (number, unit) = match said.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (said.strip_suffix('s').expect("seconds"), 1.0),
    };
    Duration::from_secs_f64(unit * number.parse::<f64>().expect("a number"))
}

fn is_said(said: &str, rank: usize, because: &str) {
    let start = format!("world aborted: rank {rank}, ");
    let end = format!("messages: {because}");
    assert!(said.starts_with(&start) && said.ends_with(&end), "{said}");
}

#[test]
fn all_say_that_a_message_of_the_rank_was_changed() {
    let world = World::of(3, quick());
    let (ways, members) = through_ways(&world);
    let said = said_by_each(members, LONG, || ways[2].change(Direction::ToCoordinator, Spot::Mac));
    let why = "a message from it failed authentication";
    is_said(&said[0], 2, why);
    is_said(&said[1], 2, why);
    let address = ways[2].address;
    is_said(&said[2], 2, &format!("the coordinator at {address} has declared rank 2 lost: {why}"));
}

#[test]
fn all_say_that_a_message_to_the_rank_was_changed() {
    let world = World::of(3, quick());
    let (ways, members) = through_ways(&world);
    let said = said_by_each(members, LONG, || ways[2].change(Direction::ToMember, Spot::Mac));
    let why = "a message to it failed authentication";
    is_said(&said[0], 2, why);
    is_said(&said[1], 2, why);
    let address = ways[2].address;
    let own = format!("rank 2 has ended its connection to the coordinator at {address}: {why}");
    is_said(&said[2], 2, &own);
}

#[test]
fn a_rank_behind_a_cut_is_unreachable_and_names_the_silent_coordinator() {
    let world = World::of(3, quick());
    let (ways, members) = through_ways(&world);
    let began = Instant::now();
    let said = said_by_each(members, LONG, || ways[2].cut(&BOTH));
    is_said(&said[0], 2, "silent for 1.05s");
    is_said(&said[1], 2, "silent for 1.05s");
    let address = ways[2].address;
    is_said(
        &said[2],
        0,
        &format!("rank 2 is cut off: nothing from the coordinator at {address} for 1.05s"),
    );
    assert!(began.elapsed() < LONG / 2, "after {:?}", began.elapsed());
}

/// As if rank 0 were stopped: nothing arrives from its process, and no connection ends.
#[test]
fn all_name_rank_0_whose_coordinator_is_silent() {
    let world = World::of(3, quick());
    let (ways, members) = through_ways(&world);
    let said = said_by_each(members, LONG, || ways.iter().for_each(|way| way.cut(&BOTH)));
    for (rank, (said, way)) in said.iter().zip(&ways).enumerate() {
        let address = way.address;
        let why =
            format!("rank {rank} is cut off: nothing from the coordinator at {address} for 1.05s");
        is_said(said, 0, &why);
    }
}

/// The deadline of the ranks passes long before the control plane calls the silence a loss. Without an answer from the coordinator,
/// each rank would name another one as late.
#[test]
fn a_silent_coordinator_makes_no_rank_late() {
    let world = World::of(3, Deadlines { beat: Duration::from_secs(1), ..quick() });
    let (ways, members) = through_ways(&world);
    let deadline = Duration::from_millis(700);
    let said = said_by_each(members, deadline, || ways.iter().for_each(|way| way.cut(&BOTH)));
    for (rank, said) in said.iter().enumerate() {
        assert!(said.starts_with("world aborted: rank 0, "), "{said}");
        let why = format!("rank {rank} has heard nothing from its coordinator for ");
        let (_, silence) = said.split_once(&why).unwrap_or_else(|| panic!("{said}"));
        assert!(duration(silence) >= ANSWER, "{said}");
    }
}

/// Its messages arrive, and it is the first whose deadline passes. It says that the others are late, and they must not adopt that.
#[test]
fn a_rank_that_hears_nothing_blames_no_other_rank() {
    let world = World::of(3, Deadlines { beat: Duration::from_secs(1), ..quick() });
    let (ways, members) = through_ways(&world);
    let deadline = Duration::from_millis(700);
    for said in said_by_each(members, deadline, || ways[0].cut(&[Direction::ToMember])) {
        assert!(said.starts_with("world aborted: rank 0, "), "{said}");
    }
}
