//! Worlds whose collectives on the device go by NCCL.

use std::env;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::{
    Channel, Contribution, DeviceAccumulator, Error, Group, Scaling, Stage, StepFailure, Tag,
    World, WorldOptions,
};
use hsdp_kernels::cuda::{DeviceBuffer, Noted};
use hsdp_kernels::{Fold, GradientValues, HostBuffer, Values, Wire, cast};
use hsdp_sharding::{DType, Param, Rank, Unit, UnitLayout};
use hsdp_tests::support::worlds::{launched, results};

use super::apart::{is_apart, run_alone};
use super::{PATIENCE, assert_same, device, download, stream, upload};

/// Parameters that straddle shards, one of them frozen.
fn layout(shards: usize) -> Arc<UnitLayout> {
    let unit = Unit::new("unit")
        .param(Param::new("weight", [37, 19]))
        .param(Param::new("table", [211]).frozen())
        .param(Param::new("wide", [9001]));
    Arc::new(UnitLayout::new(&unit, shards).expect("a layout"))
}

fn tag() -> Tag {
    Tag::new(Stage::Reduce).step(2)
}

/// A whole number, so that sums are exact in every order and dtype.
fn whole(rank: usize, at: usize) -> f32 {
    ((rank * 3 + at * 7) % 8) as f32
}

fn wholes(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| whole(rank, at)).collect()
}

/// The ranks of a mesh 2 x 2, by rows or by columns.
fn groups(world: &World) -> Result<[Group; 3], Error> {
    let rank = world.rank().index();
    let row: Vec<Rank> = (0..2).map(|other| Rank::new(rank / 2 * 2 + other)).collect();
    let column: Vec<Rank> = (0..2).map(|other| Rank::new(rank % 2 + 2 * other)).collect();
    Ok([
        world.group(&row, Channel::Gather)?,
        world.group(&row, Channel::Reduce)?,
        world.group(&column, Channel::AllReduce)?,
    ])
}

/// A buffer of f32 with these elements.
fn on_device(values: &[f32]) -> DeviceBuffer {
    upload(&stream(), Values::F32(values))
}

fn read(buffer: &DeviceBuffer) -> Vec<f32> {
    download(&stream(), buffer).values().to_f32()
}

/// A reduce-scatter of gradients that are `value` everywhere, into a partial of zeros.
fn reduced(
    group: &Group,
    layout: &Arc<UnitLayout>,
    value: &dyn Fn(usize) -> f32,
    wire: Wire,
) -> Result<Vec<f32>, Error> {
    let gradient = |slot: &hsdp_sharding::ParamSlot| {
        let values: Vec<f32> = (0..slot.len).map(|at| value(slot.start + at)).collect();
        let trained = slot.role == hsdp_sharding::Role::Trainable;
        trained.then(|| Arc::new(values) as Arc<dyn GradientValues>)
    };
    let gradients = layout.params().iter().map(gradient).collect();
    let contribution = Contribution { gradients, scaling: Scaling::on(wire) };
    let accumulator = DeviceAccumulator {
        partial: on_device(&vec![0.0; layout.trainable().shard_len]),
        fold: Fold::Add,
        noted: Noted::new(&stream()).expect("memory"),
    };
    let layout = Arc::clone(layout);
    let pending = group.reduce_unit_on_device(tag(), layout, contribution, accumulator)?;
    Ok(read(&pending.wait()?.partial))
}

/// What each rank has of a gather, a reduction and a sum over replicas on 2 x 2.
fn three_collectives(world: &World) -> Result<[Vec<f32>; 3], Error> {
    let layout = layout(2);
    let [gather, reduce, all_reduce] = groups(world)?;
    let rank = world.rank().index();
    let shard = Arc::new(on_device(&wholes(rank, layout.shard_len())));
    let full = DeviceBuffer::new(&device(), DType::F32, layout.full_len(), "a test");
    let full = full.expect("memory");
    let full = gather.gather_unit_on_device(tag(), Arc::clone(&layout), shard, full)?.wait()?;
    let partial = reduced(&reduce, &layout, &|at| whole(rank, at), Wire::BF16)?;
    let mine = on_device(&wholes(rank, 1057));
    let sum = all_reduce.all_reduce_scaled_on_device(tag(), mine, Scaling::on(Wire::F16))?;
    Ok([read(&full), partial, read(&sum.wait()?)])
}

fn connected(world: &World) -> Result<(), Error> {
    world.connect_nccl(&device())?;
    let groups = groups(world)?;
    world.connect_groups(&groups.each_ref())
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_nccl_carries_is_what_ranks_read_of_each_other() {
    let run = |connect: fn(&World) -> Result<(), Error>| {
        results(4, |world| {
            connect(&world).expect("connected");
            let results = three_collectives(&world).expect("no rank fails");
            (results, world.ledger())
        })
    };
    let by_nccl = run(connected);
    let directly = run(|_| Ok(()));
    for (rank, ((ours, our_ledger), (theirs, their_ledger))) in
        by_nccl.iter().zip(&directly).enumerate()
    {
        for (what, (ours, theirs)) in
            ["gather", "reduce", "sum"].iter().zip(ours.iter().zip(theirs))
        {
            assert_same(Values::F32(ours), Values::F32(theirs), &format!("{what}, rank {rank}"));
        }
        for channel in [Channel::Gather, Channel::Reduce, Channel::AllReduce] {
            let bytes = [our_ledger, their_ledger].map(|ledger| ledger.channel(channel).bytes);
            assert_eq!(bytes[0], bytes[1], "{channel}, rank {rank}");
        }
    }
}

/// Returns the sums of a rank's own part, and the parts of all ranks.
fn parts(world: &World, cuts: &Arc<[usize]>, dtype: DType) -> Result<[Vec<f32>; 2], Error> {
    let group = world.world_group(Channel::AllReduce);
    let slot = group.index();
    let len = cuts[group.size()];
    let own = cuts[slot]..cuts[slot + 1];
    let scaling = Scaling::on(Wire::try_from(dtype).expect("a real dtype"));
    let mine = on_device(&wholes(slot, len));
    let sum = group.reduce_scatter_scaled_on_device(tag(), Arc::clone(cuts), mine, scaling)?;
    let sums = read(&sum.wait()?)[own.clone()].to_vec();
    let mut buffer = HostBuffer::zeros(dtype, len + 5).expect("memory");
    cast(buffer.values_mut().slice(own), &sums);
    let buffer = upload(&stream(), buffer.values());
    let gathered = group
        .gather_parts_on_device(tag(), Arc::clone(cuts), buffer)
        .and_then(|pending| pending.wait())
        .map_err(|failed| failed.error)?;
    Ok([sums, read(&gathered)])
}

/// NCCL takes parts of one length only.
#[test]
#[ignore = "needs a CUDA device"]
fn uneven_parts_that_nccl_carries_are_those_that_ranks_copy() {
    for (cuts, dtype) in
        super::parts::cuts(4).into_iter().zip([DType::F32, DType::BF16, DType::F16])
    {
        let run = |connect: bool| {
            results(4, |world| {
                if connect {
                    world.connect_nccl(&device()).expect("connected");
                    let group = world.world_group(Channel::AllReduce);
                    world.connect_groups(&[&group]).expect("connected");
                }
                let parts = parts(&world, &cuts, dtype).expect("no rank fails");
                (parts, world.ledger().channel(Channel::AllReduce))
            })
        };
        let by_nccl = run(true);
        assert_eq!(by_nccl, run(false), "{cuts:?} of {dtype}");
        let sum = |at| (0..4).map(|rank| whole(rank, at)).sum();
        let sums: Vec<f32> = (0..cuts[4]).map(sum).chain([0.0; 5]).collect();
        assert!(by_nccl.iter().all(|(parts, _)| parts[1] == sums), "{cuts:?} of {dtype}");
    }
}

/// A unit of which all ranks have nothing is gathered and reduced like any other.
#[test]
#[ignore = "needs a CUDA device"]
fn operations_without_elements_are_done_at_once() {
    let unit = Unit::new("frozen").param(Param::new("table", [64]).frozen());
    let frozen = Arc::new(UnitLayout::new(&unit, 2).expect("a layout"));
    let run = |connect: fn(&World) -> Result<(), Error>| {
        results(4, |world| {
            connect(&world).expect("connected");
            let [_, reduce, all_reduce] = groups(&world).expect("groups");
            let partial = reduced(&reduce, &frozen, &|_| 1.0, Wire::BF16).expect("reduced");
            let none = on_device(&[]);
            let sum = all_reduce.all_reduce_scaled_on_device(tag(), none, Scaling::on(Wire::F16));
            let sum = sum.and_then(|pending| pending.wait()).expect("reduced");
            let after = three_collectives(&world).expect("no rank fails");
            (partial, read(&sum), after)
        })
    };
    let by_nccl = run(connected);
    let directly = run(|_| Ok(()));
    assert_eq!(by_nccl, directly);
    assert!(by_nccl.iter().all(|(partial, sum, _)| partial.is_empty() && sum.is_empty()));
}

/// In bf16, 256 + 1 is 256 again: who adds in f32 and rounds no sum gets 259.
#[test]
#[ignore = "needs a CUDA device"]
fn nccl_rounds_every_sum_to_the_wire_and_ranks_that_read_each_other_do_not() {
    let sum = |connect: bool| {
        let sums = results(4, |world| {
            let group = world.world_group(Channel::Reduce);
            if connect {
                world.connect_nccl(&device()).expect("connected");
                world.connect_groups(&[&group]).expect("connected");
            }
            let own = if world.rank().index() == 0 { 256.0 } else { 1.0 };
            reduced(&group, &layout(4), &|_| own, Wire::BF16).expect("reduced")[0]
        });
        sums[0]
    };
    assert_eq!(sum(false), 259.0);
    // The order is NCCL's own: 256 may come first or last.
    assert!([256.0, 258.0, 260.0].contains(&sum(true)), "{}", sum(true));
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_step_that_is_given_up_leaves_communicators_as_they_were() {
    let began = Instant::now();
    let ready = AtomicUsize::new(0);
    let results = results(4, |world| {
        connected(&world).expect("connected");
        let before = three_collectives(&world).expect("no rank fails");
        ready.fetch_add(1, Ordering::AcqRel);
        // Rank 3 does not come to the reduction of this step: nothing of it reaches NCCL.
        let [_, reduce, _] = groups(&world).expect("groups");
        let rank = world.rank().index();
        if rank == 3 {
            // Giving up the step before the others have what they had before would end that, too.
            while ready.load(Ordering::Acquire) < 4 && began.elapsed() < Duration::from_secs(60) {
                thread::yield_now();
            }
            let reason = "a test".to_owned();
            world.abort_step(StepFailure { step: 2, reason });
        } else {
            let given_up = reduced(&reduce, &layout(2), &|_| 1.0, Wire::F32);
            assert!(rank != 2 || given_up.is_err(), "its peer does not come");
        }
        // Who has not heard of it yet would be told by its next call.
        while world.next_epoch() == 0 {
            thread::yield_now();
        }
        (before, three_collectives(&world).expect("no rank fails"))
    });
    for (before, after) in results {
        assert_eq!(before, after);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_panics_ends_the_others_at_once() {
    let began = Instant::now();
    let ended = launched(4, WorldOptions::default(), |world: World| {
        connected(&world)?;
        three_collectives(&world)?;
        assert!(world.rank().index() != 1, "rank 1 panics on purpose");
        three_collectives(&world).map(drop)
    });
    for (rank, ended) in ended.into_iter().enumerate() {
        let Ok(outcome) = ended else {
            assert_eq!(rank, 1);
            continue;
        };
        let said = outcome.expect_err("rank 1 does not come").to_string();
        assert!(said.starts_with("world aborted: rank 1, "), "{said}");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "after {:?}", began.elapsed());
}

#[test]
#[ignore = "needs a CUDA device"]
fn worlds_that_cannot_connect_say_why() {
    let alone = World::counting(4, Rank::new(2)).expect("a rank of four");
    let said = alone.connect_nccl(&device()).expect_err("nobody is there").to_string();
    let expected =
        "the world of rank 2 cannot use NCCL: it only counts operations, and has no other ranks";
    assert_eq!(said, expected);
    let world = World::single();
    let group = world.world_group(Channel::Gather);
    let said = world.connect_groups(&[&group]).expect_err("not connected").to_string();
    let expected = "the world of rank 0 cannot use NCCL: it has no NCCL: call `connect_nccl` first";
    assert_eq!(said, expected);
}

/// Where communicators cannot be split, groups join by ids of their own: in a process in which the
/// emulated NCCL refuses to split.
#[test]
#[ignore = "needs a CUDA device"]
fn groups_whose_split_fails_join_by_ids_of_their_own() {
    run_with("HSDP_EMULATED_NCCL_SPLIT", "what_nccl_carries_is_what_ranks_read_of_each_other");
}

/// Runs another test of this file in a process of its own, in which this variable is set to 3.
/// Runs a test with a variable of the emulated NCCL. Skips it with the real one, which has no such
/// faults.
fn run_with(variable: &str, test: &str) {
    if env::var_os("HSDP_EMULATED").is_none() {
        return;
    }
    run_alone(&format!("nccl_world::{test}"), variable, "3");
}

/// Ranks that wait for something else, and not for NCCL, hear of it all the same.
#[test]
#[ignore = "needs a CUDA device"]
fn a_world_ends_when_nccl_reports_an_error_and_goes_on_while_it_does_not() {
    let fails = env::var_os("HSDP_EMULATED_NCCL_FAILS_AFTER").is_some();
    let ended = launched(4, WorldOptions::default(), |world: World| {
        connected(&world)?;
        (0..3).try_for_each(|_| three_collectives(&world).map(drop))?;
        // Long enough for several looks of the watchdog.
        let began = Instant::now();
        while world.end().is_none() && began.elapsed() < Duration::from_millis(400) {
            thread::yield_now();
        }
        world.world_group(Channel::User).barrier(Tag::default())?.wait()
    });
    for ended in ended {
        match ended.expect("no rank panics") {
            Ok(()) => assert!(!fails, "NCCL has reported an error"),
            Err(error) => {
                let said = error.to_string();
                assert!(fails && said.contains("NCCL"), "{said}");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn an_error_that_nccl_reports_later_ends_the_world() {
    run_with(
        "HSDP_EMULATED_NCCL_FAILS_AFTER",
        "a_world_ends_when_nccl_reports_an_error_and_goes_on_while_it_does_not",
    );
}

/// The last collective of a world completes, though all its communicators are let go of right after
/// it.
#[test]
#[ignore = "needs a CUDA device"]
fn what_was_issued_completes_when_worlds_are_dropped() {
    for _ in 0..5 {
        let sums = results(4, |world| {
            connected(&world).expect("connected");
            let [_, _, all_reduce] = groups(&world).expect("groups");
            let mine = on_device(&wholes(world.rank().index(), 100_000));
            let pending =
                all_reduce.all_reduce_scaled_on_device(tag(), mine, Scaling::on(Wire::F32));
            pending.and_then(|pending| pending.wait()).expect("issued")
        });
        for (rank, sum) in sums.iter().enumerate() {
            let found = sum.read_back(&stream(), PATIENCE).expect("done").values().to_f32();
            let column = [rank % 2, rank % 2 + 2];
            let expected: Vec<f32> =
                (0..100_000).map(|at| column.iter().map(|rank| whole(*rank, at)).sum()).collect();
            assert_same(Values::F32(&found), Values::F32(&expected), "a sum");
        }
    }
}

/// Nobody waits in NCCL for a rank that has failed before it came there.
#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_that_leaves_before_groups_are_connected_holds_up_nobody() {
    let began = Instant::now();
    let options = WorldOptions::default();
    let ended = launched(2, options, |world: World| {
        world.connect_nccl(&device())?;
        if world.rank().index() == 1 {
            return Ok(());
        }
        let group = world.world_group(Channel::Gather);
        world.connect_groups(&[&group])
    });
    let said = ended.into_iter().next().expect("two ranks").expect("no panic");
    let said = said.expect_err("rank 1 has left").to_string();
    assert!(said.starts_with("world aborted: rank 1"), "{said}");
    assert!(began.elapsed() < Duration::from_secs(20), "after {:?}", began.elapsed());
}

/// A gradient whose read ends after the communicators of its world were aborted.
#[derive(Debug)]
struct Outlasting(Vec<f32>);

static IS_READ: AtomicBool = AtomicBool::new(false);
static IS_ABORTED: AtomicBool = AtomicBool::new(false);

fn await_flag(flag: &AtomicBool) {
    let began = Instant::now();
    while !flag.load(Ordering::Acquire) && began.elapsed() < PATIENCE {
        thread::yield_now();
    }
}

impl GradientValues for Outlasting {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        IS_READ.store(true, Ordering::Release);
        await_flag(&IS_ABORTED);
        visit(Values::F32(&self.0[range]));
    }
}

/// Reduces gradients that are read until long after the end of the world.
fn outlasting(group: &Group) -> Result<(), Error> {
    let layout = layout(2);
    let gradient = |slot: &hsdp_sharding::ParamSlot| {
        let trained = slot.role == hsdp_sharding::Role::Trainable;
        trained.then(|| Arc::new(Outlasting(vec![1.0; slot.len])) as Arc<dyn GradientValues>)
    };
    let gradients = layout.params().iter().map(gradient).collect();
    let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
    let accumulator = DeviceAccumulator {
        partial: on_device(&vec![0.0; layout.trainable().shard_len]),
        fold: Fold::Add,
        noted: Noted::new(&stream()).expect("memory"),
    };
    group.reduce_unit_on_device(tag(), layout, contribution, accumulator)?.wait().map(drop)
}

/// A call whose communicator was aborted with its world gets the reason for the end of the world.
#[test]
#[ignore = "needs a CUDA device"]
fn a_call_on_a_communicator_that_was_aborted_says_why_the_world_has_ended() {
    let ended = launched(3, WorldOptions::default(), |world: World| {
        world.connect_nccl(&device())?;
        let members = if world.rank().index() == 2 { 2..3 } else { 0..2 };
        let members: Vec<Rank> = members.map(Rank::new).collect();
        let group = world.group(&members, Channel::Reduce)?;
        world.connect_groups(&[&group])?;
        if world.rank().index() != 2 {
            return outlasting(&group);
        }
        await_flag(&IS_READ);
        // Several looks of the watchdogs, which abort the communicators.
        let later = thread::spawn(|| {
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(500) {
                thread::yield_now();
            }
            IS_ABORTED.store(true, Ordering::Release);
        });
        world.abort("a test");
        later.join().expect("no panic");
        Ok(())
    });
    for ended in ended.into_iter().take(2) {
        let said = ended.expect("no rank panics").expect_err("the world has ended").to_string();
        assert!(said.starts_with("world aborted: rank 2"), "{said}");
    }
}

/// Where a call stays in progress, ranks are told after their deadline, and nothing is issued
/// behind it.
#[test]
#[ignore = "needs a CUDA device"]
fn a_call_that_does_not_come_to_its_stream_ends_the_world() {
    run_with(
        "HSDP_EMULATED_NCCL_STUCK_FROM",
        "calls_come_to_their_streams_or_the_world_ends_within_its_deadline",
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn buffers_come_back_from_a_call_that_does_not_come_to_its_stream() {
    run_with("HSDP_EMULATED_NCCL_STUCK_FROM", "parts_are_gathered_or_come_back");
}

#[test]
#[ignore = "needs a CUDA device"]
fn parts_are_gathered_or_come_back() {
    let stuck = env::var_os("HSDP_EMULATED_NCCL_STUCK_FROM").is_some();
    let deadline = if stuck { Duration::from_secs(2) } else { PATIENCE };
    let options = WorldOptions { deadline, ..WorldOptions::default() };
    let cuts: Arc<[usize]> = [0, 5, 1062, 1062, 2000].into();
    let ended = launched(4, options, |world: World| {
        world.connect_nccl(&device())?;
        let group = world.world_group(Channel::Gather);
        world.connect_groups(&[&group])?;
        let part = cuts[group.index()]..cuts[group.index() + 1];
        for _ in 0..6 {
            let own = on_device(&wholes(group.index(), 2003));
            let pending = group.gather_parts_on_device(tag(), Arc::clone(&cuts), own);
            let (buffer, error) = match pending.and_then(|pending| pending.wait()) {
                Ok(gathered) => (gathered, None),
                Err(failed) => {
                    let error = failed.error.clone();
                    (failed.reclaim().expect("no thread keeps it"), Some(error))
                }
            };
            let found = read(&buffer);
            let whole = wholes(group.index(), 2003);
            assert_eq!(found[part.clone()], whole[part.clone()], "{error:?}");
            assert_eq!(found[2000..], whole[2000..], "{error:?}");
            error.map_or(Ok(()), Err)?;
        }
        Ok::<(), Error>(())
    });
    for ended in ended {
        match ended.expect("no rank panics") {
            Ok(()) => assert!(!stuck, "a call has stayed in progress"),
            Err(error) => assert!(stuck && error.is_fatal(), "{error}"),
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn calls_come_to_their_streams_or_the_world_ends_within_its_deadline() {
    let stuck = env::var_os("HSDP_EMULATED_NCCL_STUCK_FROM").is_some();
    let deadline = if stuck { Duration::from_secs(2) } else { PATIENCE };
    let began = Instant::now();
    let options = WorldOptions { deadline, ..WorldOptions::default() };
    let ended = launched(4, options, |world: World| {
        connected(&world)?;
        (0..6).try_for_each(|_| three_collectives(&world).map(drop))
    });
    for ended in ended {
        match ended.expect("no rank panics") {
            Ok(()) => assert!(!stuck, "a call has stayed in progress"),
            Err(error) => assert!(
                stuck && error.to_string().contains("NCCL")
                    || error.to_string().contains("was not done in"),
                "{error}"
            ),
        }
    }
    assert!(!stuck || began.elapsed() < Duration::from_secs(20), "after {:?}", began.elapsed());
}

/// A thread that frees memory waits for what runs on the device. If it did so between the launches
/// of two ranks of a collective, the first rank would wait for the second one for ever.
#[test]
#[ignore = "needs a CUDA device"]
fn memory_that_is_freed_meanwhile_holds_up_no_collective() {
    if !is_apart("nccl_world::memory_that_is_freed_meanwhile_holds_up_no_collective") {
        return;
    }
    let options = WorldOptions { deadline: Duration::from_secs(20), ..WorldOptions::default() };
    let is_over = AtomicBool::new(false);
    let ended = thread::scope(|scope| {
        let free = || {
            while !is_over.load(Ordering::Relaxed) {
                drop(on_device(&[1.0; 64]));
                device().release_spare_memory().expect("freed");
            }
        };
        scope.spawn(free);
        let ended = launched(4, options, |world: World| {
            connected(&world)?;
            (0..100).try_for_each(|_| sum_of_column(&world))
        });
        is_over.store(true, Ordering::Relaxed);
        ended
    });
    ended.into_iter().for_each(|ended| ended.expect("no rank panics").expect("summed"));
}

fn sum_of_column(world: &World) -> Result<(), Error> {
    let [_, _, all_reduce] = groups(world)?;
    let mine = on_device(&wholes(world.rank().index(), 64));
    let sum = all_reduce.all_reduce_scaled_on_device(tag(), mine, Scaling::on(Wire::F32))?;
    sum.wait().map(drop)
}
