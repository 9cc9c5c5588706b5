//! Ranks whose messages go by the control plane: their results are those of threads that share memory.

#[path = "../common/mod.rs"]
mod common;
mod losses;
#[path = "../../control/tests/control/way.rs"]
#[allow(dead_code)]
mod way;
#[path = "../../control/tests/control/world.rs"]
#[allow(dead_code)]
mod world;

use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::outcomes;
use hsdp_comm::CallError::BadRank;
use hsdp_comm::SetupError::Incomplete;
use hsdp_comm::control::{Job, Joined};
use hsdp_comm::{Channel, Error, Group, RankFailure, Reduction, Tag, World, WorldOptions};
use hsdp_control::{Job as Name, Membership, Options, Rank, Secret, Server, Terms};

const DEADLINE: Duration = Duration::from_secs(20);

fn options() -> WorldOptions {
    WorldOptions { deadline: DEADLINE, ..WorldOptions::default() }
}

/// The processes of a job, as threads: each joins over loopback, as a process would.
fn jobs(size: u32) -> Vec<Job> {
    let (server, members) = members(size);
    let mut server = Some(server);
    let job = |membership| {
        let joined = Joined { membership, server: server.take(), local_rank: 0 };
        Job::of(joined, DEADLINE)
    };
    members.into_iter().map(job).collect()
}

/// A coordinator, and all its members.
fn members(size: u32) -> (Server, Vec<Membership>) {
    let name = Name { name: "test".to_owned(), start: 1 };
    let secret = Secret::from_bytes([0x2a; 32]);
    let control = Options::new(name, secret, Terms::new(size));
    let server = Server::start(control.clone()).expect("a coordinator");
    let control = Options { address: server.address(), ..control };
    let members = thread::scope(|scope| {
        let join = |rank: u32| {
            let rank = Rank::new(rank as usize);
            let control = control.clone();
            scope.spawn(move || Membership::join(rank, control).expect("a member"))
        };
        let joining: Vec<_> = (0..size).map(join).collect();
        joining.into_iter().map(|member| member.join().expect("it joins")).collect()
    });
    (server, members)
}

fn job_of(membership: Membership) -> Job {
    Job::of(Joined { membership, server: None, local_rank: 0 }, DEADLINE)
}

/// The result of each rank of a world of the first `size` processes; nothing on the others.
fn on_each<T: Send>(
    jobs: Vec<Job>,
    size: usize,
    act: impl Fn(World) -> T + Sync,
) -> Vec<Option<T>> {
    thread::scope(|scope| {
        let run = |job: Job| {
            let act = &act;
            scope.spawn(move || {
                let act = |world| Ok::<_, RankFailure>(act(world));
                let ran = job.launch(size, options(), act).expect("a world");
                ran.map(|ran| ran.expect("no panic"))
            })
        };
        let running: Vec<_> = jobs.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

/// Some of everything, short and long: more than the control plane passes at a time.
fn collectives(world: &World) -> Result<Vec<f32>, Error> {
    let group = world.world_group(Channel::User);
    let value = |at: usize| ((at * 31 + world.rank().index() * 7) % 1000) as f32 / 7.0;
    let mut made = Vec::new();
    for len in [0, 4, 1000, 1_000_000] {
        let own: Vec<f32> = (0..len).map(value).collect();
        let tag = Tag::default();
        let sums = group.all_reduce(tag, Reduction::Sum, own.clone())?;
        let gathered = group.all_gather(tag, own.clone())?;
        let scattered = group.reduce_scatter(tag, Reduction::Max, own)?;
        made.extend(sums.wait()?);
        made.extend(gathered.wait()?);
        made.extend(scattered.wait()?);
        group.barrier(tag)?.wait()?;
    }
    Ok(made)
}

#[test]
fn results_are_those_of_threads() {
    let expected: Vec<_> = outcomes(4, options(), |world| collectives(&world).expect("sums"))
        .into_iter()
        .map(|rank| rank.expect("no panic"))
        .collect();
    let made = on_each(jobs(4), 4, |world| collectives(&world).expect("sums"));
    let made: Vec<_> = made.into_iter().flatten().collect();
    assert!(made == expected);
}

#[test]
fn worlds_follow_each_other_and_may_be_smaller() {
    let jobs = jobs(3);
    for size in [3, 2, 3, 1_u32] {
        let made = on_each(jobs.clone(), size as usize, |world| {
            let group = world.world_group(Channel::User);
            let own = vec![world.rank().get()];
            group.all_gather(Tag::default(), own).and_then(hsdp_comm::Pending::wait).expect("ranks")
        });
        let all: Vec<u32> = (0..size).collect();
        let ranks: Vec<_> = (0..3).map(|rank| (rank < size).then(|| all.clone())).collect();
        assert_eq!(made, ranks);
    }
    // They end together, as processes do.
    thread::scope(|scope| jobs.into_iter().for_each(|job| drop(scope.spawn(|| drop(job)))));
}

#[test]
fn a_panic_is_named_on_all_ranks() {
    let jobs = jobs(3);
    let began = Instant::now();
    let ended: Vec<_> = thread::scope(|scope| {
        let run = |job: Job| {
            scope.spawn(move || {
                let act = |world: World| {
                    assert!(world.rank().index() != 1, "on purpose");
                    let error = collectives(&world).expect_err("rank 1 does not come");
                    Ok::<_, RankFailure>(error.to_string())
                };
                catch_unwind(AssertUnwindSafe(|| job.launch(3, options(), act)))
            })
        };
        let running: Vec<_> = jobs.into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    for rank in [0, 2] {
        let ran = ended[rank].as_ref().expect("no panic").as_ref().expect("a world");
        let said = ran.as_ref().expect("it is a rank").as_ref().expect("no panic");
        assert!(said.starts_with("world aborted: rank 1, "), "{said}");
        assert!(said.contains("on purpose"), "{said}");
    }
    assert!(began.elapsed() < DEADLINE, "after {:?}", began.elapsed());
}

#[test]
fn an_error_reaches_all_ranks_with_its_text() {
    let act = |world: World| -> Result<(), Box<dyn StdError + Send + Sync>> {
        if world.rank().index() == 1 {
            return Err("the tokens cannot be read".into());
        }
        Ok(collectives(&world).map(drop)?)
    };
    let began = Instant::now();
    let ended: Vec<_> = thread::scope(|scope| {
        let run = |job: Job| scope.spawn(move || job.launch(3, options(), act));
        let running: Vec<_> = jobs(3).into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    for (rank, ended) in ended.into_iter().enumerate() {
        let ended = ended.expect("a world").expect("it is a rank");
        let said = ended.expect_err("rank 1 has failed").to_string();
        assert!(rank == 1 || said.starts_with("world aborted: rank 1, "), "{said}");
        assert!(said.ends_with("the tokens cannot be read"), "{said}");
    }
    assert!(began.elapsed() < DEADLINE, "after {:?}", began.elapsed());
}

#[test]
fn other_options_are_refused_with_both_sides() {
    let refused: Vec<_> = thread::scope(|scope| {
        let run = |job: Job| {
            let late = if job.rank().index() == 1 { 5 } else { 0 };
            let options =
                WorldOptions { deadline: DEADLINE + Duration::from_secs(late), ..options() };
            scope.spawn(move || job.world(2, options).map(drop).map_err(|error| error.to_string()))
        };
        let running: Vec<_> = jobs(2).into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    for refused in refused {
        let refused = refused.expect_err("they differ");
        assert!(refused.contains("20s") && refused.contains("25s"), "{refused}");
    }
}

/// The result of each process of a job. Each asks for a world of its own size.
fn asking(sizes: &[usize]) -> Vec<Result<Option<usize>, Error>> {
    let jobs = jobs(u32::try_from(sizes.len()).expect("a few"));
    thread::scope(|scope| {
        let run = |(job, size): (Job, usize)| {
            scope.spawn(move || Ok(job.world(size, options())?.map(|world| world.size())))
        };
        let running: Vec<_> = jobs.into_iter().zip(sizes.iter().copied()).map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

#[test]
fn other_sizes_are_refused_at_once_on_all_processes() {
    let began = Instant::now();
    for sizes in [[4, 4, 4, 6], [4, 4, 4, 2], [2, 2, 2, 4]] {
        for refused in asking(&sizes) {
            let said = refused.expect_err("they differ").to_string();
            let [one, other] = [sizes[0], sizes[3]].map(|size| format!("{size} (process "));
            assert!(
                said.starts_with("ranks 0 and 3 differ in their size of the world: "),
                "{said}"
            );
            assert!(said.contains(&one) && said.contains(&other), "{said}");
        }
    }
    assert!(began.elapsed() < DEADLINE / 2, "after {:?}", began.elapsed());
    for refused in asking(&[3, 3]) {
        assert!(matches!(refused, Err(Error::Call(BadRank { size: 2, .. }))), "{refused:?}");
    }
}

#[test]
fn a_process_that_does_not_come_to_a_world_is_not_waited_for_twice() {
    let mut jobs = jobs(2);
    let absent = jobs.pop();
    let first = jobs.pop().expect("rank 0");
    let deadline = Duration::from_millis(100);
    let missed = first.world(2, WorldOptions { deadline, ..options() }).map(drop);
    let expected = Incomplete { deadline, arrived: vec![0], missing: vec![1] };
    assert_eq!(missed, Err(expected.into()));
    let began = Instant::now();
    drop(first);
    assert!(began.elapsed() < DEADLINE / 2, "after {:?}", began.elapsed());
    drop(absent);
}

/// The error of each rank of a world that waits for one that does not come.
fn said_by_each(jobs: Vec<Job>, size: usize, meanwhile: impl FnOnce()) -> Vec<String> {
    thread::scope(|scope| {
        let run = |job: Job| {
            scope.spawn(move || {
                let world = job.world(size, options()).map_err(|error| error.to_string())?;
                let world = world.ok_or("it is no rank")?;
                let group = world.world_group(Channel::User);
                let waited = group.barrier(Tag::default()).and_then(hsdp_comm::Pending::wait);
                waited.map_err(|error| error.to_string())
            })
        };
        let running: Vec<_> = jobs.into_iter().map(run).collect();
        meanwhile();
        let said = |rank: thread::ScopedJoinHandle<'_, Result<(), String>>| {
            rank.join().expect("no panic").expect_err("not all come")
        };
        running.into_iter().map(said).collect()
    })
}

/// The connection of a member ends, and its process, which is also that of the others, runs on.
#[test]
fn a_rank_whose_connection_has_ended_is_named_by_the_control_plane() {
    let (server, mut members) = members(3);
    let lost = members.pop().expect("the last one");
    let jobs = members.into_iter().map(job_of).collect();
    let began = Instant::now();
    for said in said_by_each(jobs, 3, || drop(lost)) {
        assert!(said.starts_with("world aborted: rank 2"), "{said}");
        let expected = "it cannot send or receive messages: its connection ended before it left";
        assert!(said.ends_with(expected), "{said}");
    }
    assert!(began.elapsed() < DEADLINE / 2, "after {:?}", began.elapsed());
    drop(server);
}

#[test]
fn without_a_coordinator_nobody_is_reached() {
    let (server, members) = members(3);
    let mut jobs: Vec<_> = members.into_iter().map(job_of).collect();
    let absent = jobs.pop();
    let began = Instant::now();
    for said in said_by_each(jobs, 3, || drop(server)) {
        assert!(said.starts_with("world aborted: rank 0, "), "{said}");
        assert!(said.contains("has lost the coordinator at 127.0.0.1"), "{said}");
    }
    assert!(began.elapsed() < DEADLINE / 2, "after {:?}", began.elapsed());
    drop(absent);
}

/// More than may be under way, in two worlds at once.
#[test]
fn two_worlds_share_what_may_be_under_way() {
    const LEN: usize = 4 << 20;
    let made = thread::scope(|scope| {
        let run = |job: Job| {
            scope.spawn(move || {
                let worlds = [0, 1].map(|_| job.world(2, options()).expect("a world"));
                let worlds = worlds.map(|world| world.expect("a rank"));
                let groups = worlds.each_ref().map(|world| world.world_group(Channel::User));
                let own = vec![job.rank().get(); LEN];
                let gather = |group: &Group| group.all_gather(Tag::default(), own.clone());
                let pending = groups.each_ref().map(|group| gather(group).expect("it is issued"));
                let made = pending.map(|pending| pending.wait().expect("both come"));
                made.map(|made| (made.len(), made[0], made[2 * LEN - 1]))
            })
        };
        let running: Vec<_> = jobs(2).into_iter().map(run).collect();
        running.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
    });
    assert_eq!(made, [[(2 * LEN, 0, 1); 2]; 2]);
}
