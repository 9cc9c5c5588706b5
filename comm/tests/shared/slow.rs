//! Channels that are slow on purpose: an operation takes longer, and nobody sleeps for it but who waits.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::WorldError::WorkFailed;
use hsdp_comm::{
    AbortReason, Between, Channel, Error, FlightRecord, FlightState, Group, Op, Pending, Reduction,
    SlowChannel, Stage, Tag, Workers, World, WorldOptions,
};
use hsdp_kernels::HostBuffer;
use hsdp_sharding::{Param, Unit, UnitLayout};

use crate::common::outcomes;

/// How long an operation is on its link. Nothing else here takes a tenth of it, unless the machine is busy.
const LATENCY: Duration = Duration::from_millis(100);

fn slow(channel: Channel) -> SlowChannel {
    SlowChannel { channel, latency: LATENCY, bytes_per_second: None }
}

/// The results of two ranks of a world with these slow channels.
fn on_two<T: Send>(
    slow: &[SlowChannel],
    run: impl Fn(World) -> Result<T, Error> + Sync,
) -> Vec<Result<T, Error>> {
    let options =
        WorldOptions { slow: slow.to_vec(), workers: Workers::Count(1), ..WorldOptions::default() };
    outcomes(2, options, run).into_iter().map(|rank| rank.expect("no rank panics")).collect()
}

fn sum(group: &Group, len: usize) -> Result<Pending<Vec<f32>>, Error> {
    group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0; len])
}

/// How long `run` took, and what it returned.
fn timed<T>(run: impl FnOnce() -> Result<T, Error>) -> Result<(Duration, T), Error> {
    let started = Instant::now();
    let output = run()?;
    Ok((started.elapsed(), output))
}

#[expect(clippy::disallowed_methods, reason = "that time passes is what is tested")]
fn sleep(time: Duration) {
    thread::sleep(time);
}

#[test]
fn an_operation_takes_as_long_as_its_channel_and_what_it_gives_is_the_same() {
    // Done by the last member in its call, and by a worker.
    for len in [1, 1 << 20] {
        let ends = on_two(&[slow(Channel::User)], |world| {
            timed(|| sum(&world.world_group(Channel::User), len)?.wait())
        });
        for end in ends {
            let (took, output) = end.expect("summed");
            assert!(took >= LATENCY, "{len} elements took {took:?}");
            assert_eq!(output, vec![2.0; len]);
        }
    }
}

#[test]
fn it_is_complete_in_time_though_nobody_waits() {
    let worlds = World::local(
        2,
        WorldOptions { slow: vec![slow(Channel::User)], ..WorldOptions::default() },
    );
    let issue = |world: &World| sum(&world.world_group(Channel::User), 1).expect("issued");
    let (issuing, pending) =
        timed(|| Ok(worlds.iter().map(issue).collect::<Vec<_>>())).expect("issued");
    if issuing < LATENCY {
        assert!(pending.iter().all(|pending| !pending.is_complete()), "issuing took {issuing:?}");
    }
    sleep(LATENCY);
    assert!(pending.iter().all(Pending::is_complete));
}

#[test]
fn a_link_carries_one_operation_at_a_time_and_each_group_has_its_own() {
    const EACH: u32 = 2;
    // So many groups that a busy machine, which delays all, does not make them look like one after the other.
    let channels = [Channel::Gather, Channel::Reduce, Channel::AllReduce, Channel::User];
    let latency = 2 * LATENCY;
    let slow = channels.map(|channel| SlowChannel { latency, ..slow(channel) });
    let ends = on_two(&slow, |world| {
        let groups = channels.map(|channel| world.world_group(channel));
        timed(|| {
            let rounds = (0..EACH).flat_map(|_| &groups);
            let pending: Vec<_> = rounds.map(|group| sum(group, 1)).collect::<Result<_, _>>()?;
            pending.into_iter().try_for_each(|pending| pending.wait().map(drop))
        })
    });
    for end in ends {
        let (took, ()) = end.expect("summed");
        assert!(took >= EACH * latency, "one after the other in a group: {took:?}");
        assert!(took < (4 * EACH - 1) * latency, "four groups at a time: {took:?}");
    }
}

#[test]
fn bytes_take_their_time() {
    // Of 1,000,000 elements each rank receives half as contributions, and half as sums: 4,000,000 bytes.
    let bytes_per_second = NonZeroU64::new(40_000_000);
    let slow = SlowChannel { channel: Channel::User, latency: Duration::ZERO, bytes_per_second };
    let ends = on_two(&[slow], |world| {
        timed(|| sum(&world.world_group(Channel::User), 1_000_000)?.wait())
    });
    for end in ends {
        let (took, _) = end.expect("summed");
        assert!(took >= Duration::from_millis(100), "{took:?}");
    }
}

#[test]
fn the_only_worker_goes_on_with_other_channels() {
    let slow = SlowChannel { latency: Duration::from_secs(60), ..slow(Channel::User) };
    let ends = on_two(&[slow], |world| {
        let slow = world.world_group(Channel::User);
        let fast = world.world_group(Channel::Gather);
        let held = sum(&slow, 1 << 16)?;
        // Large enough for the worker, and not waited for: nobody else can do it.
        let pending = sum(&fast, 1 << 16)?;
        while !pending.is_complete() {
            thread::yield_now();
        }
        assert!(!held.is_complete(), "the worker has waited for the slow channel");
        pending.wait()
    });
    assert_eq!(ends, vec![Ok(vec![2.0; 1 << 16]); 2]);
}

#[test]
fn the_deadline_ends_what_takes_too_long() {
    let slow = SlowChannel { latency: Duration::from_secs(3600), ..slow(Channel::User) };
    let deadline = Duration::from_millis(100);
    let options = WorldOptions { slow: vec![slow], deadline, ..WorldOptions::default() };
    let ends = outcomes(2, options, |world| sum(&world.world_group(Channel::User), 1)?.wait());
    for end in ends {
        let error = end.expect("no panic").expect_err("an hour is too long");
        let is_late = matches!(
            &error,
            Error::World(WorkFailed { reason: AbortReason::Deadline { missing, .. }, .. }) if missing.is_empty()
        );
        assert!(is_late, "{error}");
    }
}

#[test]
fn a_world_that_ends_takes_nothing_away_from_those_who_were_all_there() {
    let ends = on_two(&[slow(Channel::User)], |world| {
        let group = world.world_group(Channel::User);
        let held = sum(&group, 1)?;
        world.world_group(Channel::Control).barrier(Tag::default())?.wait()?;
        world.abort("the test ends it");
        held.wait()
    });
    assert_eq!(ends, vec![Ok(vec![2.0]), Ok(vec![2.0])]);
}

#[test]
fn the_flight_record_says_how_long_it_was_on_its_way() {
    let ends = on_two(&[slow(Channel::User)], |world| {
        sum(&world.world_group(Channel::User), 1)?.wait()?;
        Ok(world.flight_record())
    });
    for record in ends {
        let record = record.expect("summed");
        let entry = record.entries.iter().find(|entry| entry.op == Op::AllReduce).expect("noted");
        assert_eq!(entry.state, FlightState::Complete);
        let took = entry.settled_ns.expect("settled") - entry.issued_ns;
        assert!(u128::from(took) >= LATENCY.as_nanos(), "{took} ns");
    }
}

/// Where ranks are threads, in one memory or apart.
const BETWEEN: [Between; 2] = [Between::Memory, Between::Messages];

/// Runs an operation of four ranks on a slow channel that carries 12 bytes a millisecond. Returns
/// how long it took on each, as the flight records have it.
fn times(between: Between, run: impl Fn(&Group) -> Result<(), Error> + Sync) -> Vec<Duration> {
    let bytes_per_second = NonZeroU64::new(12_000);
    let slow = SlowChannel { channel: Channel::User, latency: LATENCY, bytes_per_second };
    let options = WorldOptions { slow: vec![slow], between, ..WorldOptions::default() };
    let ends = outcomes(4, options, |world| {
        // Then all issue at about the same time.
        world.world_group(Channel::Control).barrier(Tag::default())?.wait()?;
        run(&world.world_group(Channel::User))?;
        Ok::<_, Error>(world.flight_record())
    });
    let took = |end: Result<Result<FlightRecord, Error>, _>| {
        let record = end.expect("no rank panics").expect("the operation is complete");
        let entry = record.entries.iter().find(|entry| entry.channel == Channel::User);
        let entry = entry.expect("noted");
        Duration::from_nanos(entry.settled_ns.expect("settled") - entry.issued_ns)
    };
    ends.into_iter().map(took).collect()
}

/// Checks that operations took their latency and the time of so many bytes, and less than twice
/// that time.
fn assert_carried(times: &[Duration], bytes: u64) {
    let expected = LATENCY + Duration::from_millis(bytes / 12);
    // The last member may have issued later than the others, and itself some moments ago.
    let fits = |took: &Duration| *took < 2 * expected && *took + LATENCY / 2 > expected;
    assert!(times.iter().all(fits), "{times:?}, expected {expected:?}");
}

#[test]
fn a_gather_of_parts_takes_the_time_of_the_parts_of_others_whatever_its_stage() {
    // Rank 0 receives 900 elements. The others receive 700, of which they know between messages.
    let cuts: Arc<[usize]> = [0, 100, 400, 700, 1_000].into();
    for (between, stage) in BETWEEN
        .into_iter()
        .flat_map(|between| [Stage::Export, Stage::GatherSlices].map(|stage| (between, stage)))
    {
        let times = times(between, |group| {
            let buffer = HostBuffer::F32(vec![1.0; 1_000]);
            let pending = group.gather_parts(Tag::new(stage), Arc::clone(&cuts), buffer);
            let gathered = pending.and_then(|pending| pending.wait());
            gathered.map(drop).map_err(|failed| failed.error)
        });
        match between {
            Between::Memory => assert_carried(&times, 3_600),
            Between::Messages => {
                assert_carried(&times[..1], 3_600);
                assert_carried(&times[1..], 2_800);
            }
        }
    }
}

/// Between messages an all-reduce has two rounds.
#[test]
fn an_all_reduce_occupies_its_link_once() {
    for between in BETWEEN {
        let times = times(between, |group| sum(group, 1_000)?.wait().map(drop));
        assert_carried(&times, 6_000);
    }
}

/// Four ranks share the copy of two shards.
#[test]
fn a_gather_for_all_takes_the_time_of_the_shards_that_its_holder_receives() {
    let unit = Unit::new("unit").param(Param::new("w", [2_000]));
    let layout = Arc::new(UnitLayout::new(&unit, 2).expect("a layout"));
    let times = times(Between::Memory, |group| {
        let buffers = || Arc::new(vec![HostBuffer::F32(vec![0.0; 2_000])]);
        let holder = (group.index() == 0).then(buffers);
        let shard = HostBuffer::F32(vec![1.0; layout.shard_len()]);
        let layout = Arc::clone(&layout);
        group.gather_unit_shared(Tag::default(), layout, shard, holder)?.wait().map(drop)
    });
    assert_carried(&times, 4 * layout.shard_len() as u64);
}
