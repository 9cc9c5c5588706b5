//! Code of users that panics: when it lends, or when what it lent is dropped.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hsdp_comm::{Between, Channel, Error, Pending, Tag, Workers, World, WorldOptions};
use hsdp_kernels::{GradientValues, HostBuffer, Values};

use super::{LARGE, Reading, layout, reduce};
use crate::common::outcomes;

#[test]
fn a_gradient_that_panics_ends_the_world_and_hurts_no_worker() {
    for len in [100, 1_000_000] {
        let ends = outcomes(3, WorldOptions::default(), |world| {
            let group = world.world_group(Channel::Reduce);
            let layout = layout(3, len);
            let is_bad = world.rank().index() == 1;
            let read = move || assert!(!is_bad, "the tensor is on a device that is gone");
            reduce(&group, &layout, Arc::new(Reading(len, read))).and_then(Pending::wait)
        });
        for end in ends {
            let Ok(Err(end)) = end else { panic!("{end:?}") };
            let text = end.to_string();
            assert!(text.starts_with("world aborted: rank 1, "), "{text}");
            assert!(
                text.ends_with("it panicked: the tensor is on a device that is gone"),
                "{text}"
            );
        }
    }
}

#[test]
fn of_many_members_whose_gradients_are_read_a_few_at_a_time_the_one_is_named_that_panics() {
    for culprit in [3, 4, 5] {
        let ends = outcomes(6, WorldOptions::default(), |world| {
            let group = world.world_group(Channel::Reduce);
            let is_bad = world.rank().index() == culprit;
            let read = move || assert!(!is_bad, "it is gone");
            let gradient = Arc::new(Reading(5000, read));
            reduce(&group, &layout(6, 5000), gradient).and_then(Pending::wait)
        });
        for end in ends {
            let Ok(Err(end)) = end else { panic!("{end:?}") };
            let text = end.to_string();
            assert!(text.starts_with(&format!("world aborted: rank {culprit}, ")), "{text}");
        }
    }
}

/// A gradient that panics when it is dropped, and when it is read if it `panics`.
#[derive(Debug)]
struct Fragile {
    len: usize,
    panics: bool,
}

impl GradientValues for Fragile {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        assert!(!self.panics, "it is gone");
        visit(Values::F32(&vec![1.0; range.len()]));
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        // A second one in one go would end the process.
        assert!(thread::panicking(), "it does not let go");
    }
}

/// How a world of two ends in which rank 1 lends a fragile gradient, and is there as long as rank 0.
fn end_with_fragile(len: usize, panics: bool) -> Error {
    let options = WorldOptions { workers: Workers::Count(1), ..WorldOptions::default() };
    let started = Instant::now();
    let worlds = World::local(2, options);
    let layout = layout(2, len);
    let issue = |world: &World| {
        let gradient: Arc<dyn GradientValues> = match world.rank().index() {
            0 => Arc::new(vec![1.0_f32; len]),
            _ => Arc::new(Fragile { len, panics }),
        };
        reduce(&world.world_group(Channel::Reduce), &layout, gradient)
    };
    let ends: Vec<_> = worlds.iter().map(issue).collect();
    let mut ends = ends.into_iter().map(|it| it.and_then(Pending::wait).expect_err("it panics"));
    let end = ends.next().expect("of rank 0");
    assert!(ends.all(|other| other == end), "all ranks get one error");
    drop(worlds);
    assert!(started.elapsed() < Duration::from_secs(60), "the worker has said its last word");
    end
}

#[test]
fn a_gradient_that_panics_when_it_is_dropped_hurts_no_worker_and_is_blamed_on_nobody() {
    for len in [100, LARGE] {
        let end = end_with_fragile(len, false);
        assert!(end.is_fatal());
        let text = end.to_string();
        let begins = "world aborted in the work of reduce_scatter sum f32 ";
        assert!(text.starts_with(begins), "{text}");
        let ends = "(operation 0 on channel reduce, epoch 0): it panicked: it does not let go";
        assert!(text.ends_with(ends), "{text}");
    }
}

#[test]
fn a_gradient_that_panics_twice_hurts_no_worker_and_is_blamed_on_its_owner() {
    for len in [100, LARGE] {
        let text = end_with_fragile(len, true).to_string();
        assert!(text.starts_with("world aborted: rank 1, "), "{text}");
        assert!(text.ends_with("it panicked: it is gone"), "{text}");
    }
}

#[test]
fn a_contribution_that_panics_when_it_is_dropped_does_not_stop_the_end_of_a_world() {
    let worlds = World::local(2, WorldOptions::default());
    let group = worlds[0].world_group(Channel::Reduce);
    let fragile = Arc::new(Fragile { len: 100, panics: false });
    let pending = reduce(&group, &layout(2, 100), fragile).expect("issued");
    worlds[1].abort("enough");
    let end = pending.wait().expect_err("it was aborted");
    assert_eq!(worlds[1].end(), Some(end));
}

/// A holder of a unit's buffers that panics when it is dropped.
struct FragileHolder(Vec<HostBuffer>);

impl AsMut<Vec<HostBuffer>> for FragileHolder {
    fn as_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.0
    }
}

impl Drop for FragileHolder {
    fn drop(&mut self) {
        assert!(thread::panicking(), "it does not let go");
    }
}

/// Ranks call different functions, and the contribution of one of them panics when it is dropped for that.
#[test]
fn a_contribution_that_fits_no_other_and_panics_when_it_is_dropped_does_not_hide_that_it_fits_none()
{
    for fragile_comes_first in [true, false] {
        let worlds = World::local(2, WorldOptions::default());
        let [first, second] = [0, 1].map(|rank: usize| worlds[rank].world_group(Channel::Gather));
        let layout = layout(2, 64);
        let shard = Arc::new(vec![1.0_f32; layout.shard_len()]);
        let fragile = || {
            let holder = Arc::new(FragileHolder(vec![vec![0.0_f32; 64].into()]));
            let layout = Arc::clone(&layout);
            let shard = Arc::clone(&shard);
            first.gather_unit_shared(Tag::default(), layout, shard, Some(holder))
        };
        let plain = || second.all_gather(Tag::default(), shard.to_vec());
        let (ends, other): (_, Result<(), _>) = if fragile_comes_first {
            let pending = fragile().expect("issued");
            (plain().map(drop), pending.wait().map(drop))
        } else {
            let pending = plain().expect("issued");
            (fragile().map(drop), pending.wait().map(drop))
        };
        let end = ends.expect_err("it asks for something else");
        assert!(end.to_string().contains("ranks call different functions in"), "{end}");
        assert_eq!(other, Err(end));
    }
}

#[test]
fn a_group_of_one_that_panicked_may_be_used_again() {
    let world = World::single();
    let group = world.world_group(Channel::Reduce);
    let reads = || panic!("the tensor is gone");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        reduce(&group, &layout(1, 10), Arc::new(Reading(10, reads))).map(drop)
    }));
    assert!(panicked.is_err());
    let again = reduce(&group, &layout(1, 10), Arc::new(vec![2.0_f32; 10]));
    assert_eq!(again.and_then(Pending::wait).map(|reduced| reduced.partial[9]), Ok(2.0));
}

/// A gradient whose `read` catches the panic of the visit: it lends too few elements, or it comes before a member whose gradient panics. If
/// it is `stubborn`, it then lends again.
#[derive(Debug)]
struct Catching {
    len: usize,
    lends: usize,
    stubborn: bool,
}

impl GradientValues for Catching {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let ones = vec![1.0; range.len()];
        let lent = &ones[..self.lends.min(range.len())];
        let caught = catch_unwind(AssertUnwindSafe(|| visit(Values::F32(lent))));
        if caught.is_err() && self.stubborn {
            visit(Values::F32(&ones));
        }
    }
}

/// The error of all ranks of a world of two, in which rank 0 catches panics; rank 1 panics if `second` does.
fn end_with_caught(apart: Between, first: Catching, second: bool) -> String {
    let len = first.len;
    let first = Arc::new(first);
    let options = WorldOptions { between: apart, ..WorldOptions::default() };
    let ends = outcomes(2, options, |world| {
        let group = world.world_group(Channel::Reduce);
        let read = move || assert!(!second, "the tensor is gone");
        let gradient: Arc<dyn GradientValues> = match world.rank().index() {
            0 => Arc::clone(&first) as _,
            _ => Arc::new(Reading(len, read)),
        };
        reduce(&group, &layout(2, len), gradient).and_then(Pending::wait)
    });
    let ends = ends.into_iter().map(|end| end.expect("no rank panics").expect_err("it fails"));
    let ends: Vec<Error> = ends.collect();
    assert_eq!(ends[0], ends[1], "all ranks get one error");
    ends[0].to_string()
}

#[test]
fn a_gradient_that_hides_the_panic_of_its_visit_ends_the_world() {
    for between in [Between::Memory, Between::Messages] {
        for len in [100, LARGE] {
            let text = end_with_caught(between, Catching { len, lends: 3, stubborn: false }, false);
            assert!(text.starts_with("world aborted: rank 0, "), "{text}");
            assert!(text.contains("hid a panic of the code that reads it"), "{text}");
            let text = end_with_caught(between, Catching { len, lends: 3, stubborn: true }, false);
            assert!(text.contains("was lent 2 times, not once"), "{text}");
        }
    }
}

#[test]
fn a_gradient_that_hides_the_panic_of_another_member_ends_the_world() {
    for (stubborn, hidden) in [(false, "hid a panic"), (true, "the tensor is gone")] {
        let catching = Catching { len: 100, lends: 100, stubborn };
        let text = end_with_caught(Between::Memory, catching, true);
        // The member whose gradient panicked is the one to name.
        assert!(text.starts_with("world aborted: rank 1, "), "{text}");
        assert!(text.contains(hidden), "{text}");
    }
}
