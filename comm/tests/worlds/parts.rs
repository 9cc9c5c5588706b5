//! Buffers that members cut into parts of their own: sums and gathers of these parts, in place.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;

use half::{bf16, f16};
use hsdp_comm::{
    Accumulator, CallError, Channel, Contribution, Error, Fault, FaultKind, Group, Op, Scaling,
    Stage, StepFailure, Tag, Ungathered, World, WorldError, WorldOptions,
};
use hsdp_kernels::{Divisor, Fold, GradientValues, HostBuffer, Values, Wire, cast};
use hsdp_sharding::{ByteCount, DType, Flow, Param, Rank, Unit, UnitLayout};

use crate::common::{outcomes, results};

fn tag() -> Tag {
    Tag::new(Stage::AllReduce).step(3)
}

/// Returns numbers that differ between ranks and places, inexact in every dtype.
fn noise(rank: usize, len: usize) -> Vec<f32> {
    let value = |place: usize| {
        let mixed = (rank * 7 + place + 1).wrapping_mul(2_654_435_761) % 100_003;
        (f32::from(u16::try_from(mixed % 50_021).expect("below 65536")) - 25_000.0) / 977.0
    };
    (0..len).map(value).collect()
}

/// Returns lists of starts of the members' parts, each with the end: no elements, uneven parts
/// (some of them empty), and one member that has all.
fn cuts(members: usize) -> Vec<Arc<[usize]>> {
    let of = |lens: &dyn Fn(usize) -> usize| -> Arc<[usize]> {
        let ends = (0..members).scan(0, |end, slot| {
            *end += lens(slot);
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    };
    vec![
        of(&|_| 0),
        of(&|slot| [5, 0, 3, 1, 0][slot]),
        of(&|slot| [0, 17_003, 40_960, 1, 8][slot]),
        of(&|slot| if slot + 1 == members { 1003 } else { 0 }),
    ]
}

fn part(cuts: &[usize], slot: usize) -> Range<usize> {
    cuts[slot]..cuts[slot + 1]
}

fn divisor(value: f32) -> Divisor {
    Divisor::new(value).expect("a divisor")
}

fn scalings() -> [Scaling; 4] {
    let scaling = |wire, pre, post| Scaling { wire, pre: divisor(pre), post: divisor(post) };
    [
        scaling(Wire::F32, 1.0, 1.0),
        scaling(Wire::BF16, 1.0, 3.0),
        scaling(Wire::F16, 4.0, 2.0),
        scaling(Wire::BF16, 3.0, 0.5),
    ]
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn each_member_gets_the_bits_of_an_all_reduce_in_its_own_part() {
    for (size, scaling) in (1..=5).flat_map(|size| scalings().map(|scaling| (size, scaling))) {
        for cuts in cuts(size) {
            let sums = results(size, |world| {
                let group = world.world_group(Channel::AllReduce);
                let mine = || noise(group.index(), cuts[size]);
                let all = group.all_reduce_scaled(tag(), mine(), scaling).expect("issued");
                let own = group
                    .reduce_scatter_scaled(tag(), Arc::clone(&cuts), mine(), scaling)
                    .expect("issued");
                (own.wait().expect("reduced"), all.wait().expect("reduced"))
            });
            for (slot, (own, all)) in sums.into_iter().enumerate() {
                assert_eq!(own.len(), all.len());
                let part = part(&cuts, slot);
                assert_eq!(bits(&own[part.clone()]), bits(&all[part]), "{size} {cuts:?}");
            }
        }
    }
}

/// Returns a member's buffer: its part of `whole`, and something else outside of it.
fn own_part(dtype: DType, whole: &[f32], part: Range<usize>, tail: usize) -> HostBuffer {
    let mut values = vec![-7.5; whole.len() + tail];
    values[part.clone()].copy_from_slice(&whole[part]);
    let mut buffer = HostBuffer::zeros(dtype, values.len()).expect("a real dtype");
    cast(buffer.values_mut(), &values);
    buffer
}

fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|value| match dtype {
            DType::F16 => f16::from_f32(*value).to_f32(),
            DType::BF16 => bf16::from_f32(*value).to_f32(),
            _ => *value,
        })
        .collect()
}

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

#[test]
fn every_member_gets_the_parts_of_all_and_what_lies_behind_them_stays() {
    for (size, dtype) in (1..=5).flat_map(|size| DTYPES.map(|dtype| (size, dtype))) {
        for cuts in cuts(size) {
            let whole = noise(9, cuts[size]);
            let gathered = results(size, |world| {
                let group = world.world_group(Channel::Gather);
                let slot = group.index();
                // Buffers may differ in length.
                let buffer = own_part(dtype, &whole, part(&cuts, slot), 3 * slot);
                let pending = group.gather_parts(tag(), Arc::clone(&cuts), buffer);
                pending.expect("issued").wait().expect("gathered")
            });
            for (slot, buffer) in gathered.into_iter().enumerate() {
                assert_eq!(buffer.dtype(), dtype);
                let found = buffer.values().to_f32();
                let (parts, tail) = found.split_at(whole.len());
                assert_eq!(parts, rounded(dtype, &whole), "{size} {dtype} {cuts:?}");
                assert_eq!(tail, vec![-7.5; 3 * slot]);
            }
        }
    }
}

/// A part that is large enough to be written past the caches, in many blocks.
#[test]
fn large_parts_are_gathered_and_summed() {
    let len = 3 << 20;
    let cuts: Arc<[usize]> = [0, len / 3 + 5, len].into();
    let whole = noise(9, len);
    let both = results(2, |world| {
        let group = world.world_group(Channel::Gather);
        let part = part(&cuts, group.index());
        let buffer = own_part(DType::F32, &whole, part.clone(), 1);
        let gathered = group.gather_parts(tag(), Arc::clone(&cuts), buffer).expect("issued");
        let scaling = Scaling::on(Wire::F32);
        let sums = group.reduce_scatter_scaled(tag(), Arc::clone(&cuts), vec![1.5; len], scaling);
        let sums = sums.and_then(|pending| pending.wait()).expect("reduced");
        (gathered.wait().expect("gathered").values().to_f32(), sums[part].to_vec())
    });
    for (gathered, sums) in both {
        assert!(gathered[..len] == whole && gathered[len] == -7.5);
        assert!(sums.iter().all(|sum| *sum == 3.0));
    }
}

/// Small gathers of all ranks on the control channel go another way, where ranks share no memory.
#[test]
fn parts_are_gathered_on_the_control_channel() {
    for last in [1, 4000, 70_000] {
        let cuts: Arc<[usize]> = [0, 7, 7, 7 + last].into();
        let whole = noise(9, cuts[3]);
        let gathered = results(3, |world| {
            let group = world.world_group(Channel::Control);
            let buffer = own_part(DType::F32, &whole, part(&cuts, group.index()), 0);
            let pending = group.gather_parts(tag(), Arc::clone(&cuts), buffer).expect("issued");
            pending.wait().expect("gathered")
        });
        assert!(gathered.into_iter().all(|buffer| buffer == HostBuffer::F32(whole.clone())));
    }
}

/// Returns what a rank counts of one sum and one gather.
fn counted(world: &World, cuts: &Arc<[usize]>, count: usize) -> [Flow; 2] {
    let group = world.world_group(Channel::AllReduce);
    let scaling = Scaling::on(Wire::BF16);
    let sum = group.reduce_scatter_scaled(tag(), Arc::clone(cuts), vec![1.0; count], scaling);
    sum.and_then(|pending| pending.wait()).expect("reduced");
    let buffer = HostBuffer::F16(vec![f16::ONE; count + 3]);
    let gathered = group.gather_parts(tag(), Arc::clone(cuts), buffer).expect("issued");
    assert_eq!(gathered.wait().expect("gathered"), HostBuffer::F16(vec![f16::ONE; count + 3]));
    let ledger = world.ledger();
    [Op::ReduceScatter, Op::AllGather].map(|op| ledger.op(Channel::AllReduce, op))
}

#[test]
fn what_comes_from_other_ranks_is_counted_also_without_them() {
    for size in 1..=5 {
        for cuts in cuts(size) {
            let count = cuts[size];
            let measured = results(size, |world| counted(&world, &cuts, count));
            for (slot, found) in measured.into_iter().enumerate() {
                let own = part(&cuts, slot).len();
                let calls = u64::from(size > 1);
                let flow = |elements| Flow { calls, bytes: ByteCount::of(elements * 2) };
                assert_eq!(found, [flow((size - 1) * own), flow(count - own)], "{size} {cuts:?}");
                let alone = World::counting(size, Rank::new(slot)).expect("a rank of the world");
                assert_eq!(counted(&alone, &cuts, count), found);
            }
        }
    }
}

/// Returns a buffer whose own part is recognized when it comes back.
fn precious(group: &Group, cuts: &[usize]) -> HostBuffer {
    own_part(DType::F32, &noise(9, cuts[group.size()]), part(cuts, group.index()), 2)
}

/// Checks that a buffer is the one that was lent: its own part and what lies behind all parts are
/// as they were.
fn assert_is_back(group: &Group, cuts: &[usize], buffer: &HostBuffer) {
    let count = cuts[group.size()];
    let part = part(cuts, group.index());
    let found = buffer.values().to_f32();
    assert_eq!(found[part.clone()], noise(9, count)[part]);
    assert_eq!(found[count..], [-7.5; 2]);
}

fn assert_is_gathered(group: &Group, cuts: &[usize], buffer: &HostBuffer) {
    assert_is_back(group, cuts, buffer);
    assert_eq!(buffer.values().to_f32()[..cuts[group.size()]], noise(9, cuts[group.size()]));
}

fn reclaimed(failed: Ungathered<HostBuffer>) -> HostBuffer {
    failed.reclaim().expect("no thread keeps the buffer")
}

#[test]
fn cuts_that_do_not_fit_are_refused_and_the_buffer_comes_back() {
    let worlds = World::local(2, WorldOptions::default());
    let group = worlds[0].world_group(Channel::AllReduce);
    let scaling = Scaling::on(Wire::F32);
    let wrong: [(&[usize], &str); 6] = [
        (&[], "the list of cuts has 0 elements, expected 3"),
        (&[0, 8], "the list of cuts has 2 elements, expected 3"),
        (&[0, 1, 2, 8], "the list of cuts has 4 elements, expected 3"),
        (&[1, 4, 8], "the cuts [1, 4, 8] do not ascend from 0"),
        (&[0, 9, 8], "the cuts [0, 9, 8] do not ascend from 0"),
        (&[0, 4, 9], "has 8 elements, expected "),
    ];
    for (cuts, expected) in wrong {
        let cuts: Arc<[usize]> = cuts.into();
        let sum = group.reduce_scatter_scaled(tag(), Arc::clone(&cuts), vec![1.0; 8], scaling);
        let error = sum.expect_err("they do not fit");
        assert!(matches!(error, Error::Call(CallError::Refused { op: Op::ReduceScatter, .. })));
        assert!(error.to_string().contains(expected), "{error}");
        let refused = group.gather_parts(tag(), cuts, HostBuffer::F32(vec![1.0; 8]));
        let refused = refused.expect_err("they do not fit");
        let error = refused.error.clone();
        assert!(matches!(error, Error::Call(CallError::Refused { op: Op::AllGather, .. })));
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(reclaimed(refused), HostBuffer::F32(vec![1.0; 8]));
    }
    // A sum has no elements behind the parts.
    let cuts: Arc<[usize]> = [0, 4, 7].into();
    let sum = group.reduce_scatter_scaled(tag(), Arc::clone(&cuts), vec![1.0; 8], scaling);
    assert!(sum.expect_err("one too many").to_string().contains("has 8 elements, expected 7"));
    assert!(group.gather_parts(tag(), cuts, HostBuffer::F32(vec![1.0; 8])).is_ok());
}

/// Returns the error of all members where member 2 cuts its buffer in another place.
fn end_of_other_cuts(call: impl Fn(&Group, Arc<[usize]>) -> Result<(), Error> + Sync) -> String {
    let ends = results(4, |world| {
        let group = world.world_group(Channel::User);
        let third = if group.index() == 2 { 40 } else { 41 };
        let end = call(&group, [0, 30, 30, third, 90].into()).expect_err("cuts differ");
        assert!(matches!(end, Error::World(WorldError::Mismatch(_))), "{end}");
        end
    });
    assert!(ends.iter().all(|end| *end == ends[0]), "all members get one error");
    ends[0].to_string()
}

#[test]
fn members_that_cut_in_different_places_all_get_one_error() {
    let expected = "members 0 and 2 cut their buffers in different places in operation 0 on \
                    channel user, epoch 0:";
    let end = end_of_other_cuts(|group, cuts| {
        let scaling = Scaling::on(Wire::F32);
        group.reduce_scatter_scaled(tag(), cuts, vec![1.0; 90], scaling)?.wait().map(drop)
    });
    assert!(end.contains(expected), "{end}");
    let end = end_of_other_cuts(|group, cuts| {
        let buffer = precious(group, &cuts);
        let pending = group.gather_parts(tag(), Arc::clone(&cuts), buffer);
        let failed = pending.and_then(|pending| pending.wait());
        failed.map(drop).map_err(|failed| {
            let error = failed.error.clone();
            assert_is_back(group, &cuts, &reclaimed(failed));
            error
        })
    });
    assert!(end.contains(expected), "{end}");
}

#[test]
fn a_sum_of_parts_and_one_of_a_unit_differ() {
    let unit = Unit::new("unit").param(Param::new("w", [64]));
    let layout = Arc::new(UnitLayout::new(&unit, 2).expect("a layout"));
    let len = layout.trainable().len;
    let ends = results(2, |world| {
        let group = world.world_group(Channel::User);
        let scaling = Scaling::on(Wire::F32);
        if group.index() == 0 {
            let cuts = [0, 4, len].into();
            let sum = group.reduce_scatter_scaled(tag(), cuts, vec![1.0; len], scaling)?;
            return sum.wait().map(drop);
        }
        let contribution = Contribution { gradients: vec![None], scaling };
        let partial = vec![0.0; layout.trainable().shard_len];
        let accumulator = Accumulator { partial, fold: Fold::Replace };
        let sum = group.reduce_unit(tag(), Arc::clone(&layout), contribution, accumulator)?;
        sum.wait().map(drop)
    });
    assert_eq!(ends[0], ends[1]);
    let error = ends[0].as_ref().expect_err("they differ").to_string();
    assert!(error.contains("ranks call different functions"), "{error}");
}

fn uneven() -> Arc<[usize]> {
    [0, 5, 5, 60_005].into()
}

/// Gathers, in a world whose last step was discarded.
fn gathered_again(world: &World, group: &Group, cuts: &Arc<[usize]>, buffer: HostBuffer) {
    assert_eq!(world.next_epoch(), 1);
    let pending = group.gather_parts(tag(), Arc::clone(cuts), buffer).expect("issued");
    assert_is_gathered(group, cuts, &pending.wait().expect("all come"));
}

#[test]
fn a_buffer_comes_back_from_a_step_that_is_aborted_and_is_gathered_again() {
    let cuts = uneven();
    for _ in 0..20 {
        results(3, |world| {
            let group = world.world_group(Channel::Gather);
            let own = precious(&group, &cuts);
            let buffer = if group.index() == 1 {
                world.abort_step(StepFailure { step: 3, reason: "it gives up".to_owned() });
                own
            } else {
                let pending = group.gather_parts(tag(), Arc::clone(&cuts), own);
                let failed = pending.and_then(|pending| pending.wait());
                let failed = failed.expect_err("rank 1 does not come");
                assert!(matches!(failed.error, Error::StepAborted { .. }), "{failed:?}");
                reclaimed(failed)
            };
            assert_is_back(&group, &cuts, &buffer);
            gathered_again(&world, &group, &cuts, buffer);
        });
    }
}

/// Some have all that they need when the step ends: the gather succeeds for all, or for none.
#[test]
fn a_gather_that_meets_the_end_of_its_step_loses_no_buffer() {
    let cuts = uneven();
    for turn in 0..60 {
        let complete = results(3, |world| {
            let group = world.world_group(Channel::Gather);
            let pending = group.gather_parts(tag(), Arc::clone(&cuts), precious(&group, &cuts));
            if group.index() == turn % 3 {
                world.abort_step(StepFailure { step: 3, reason: "it gives up".to_owned() });
            }
            let (is_complete, buffer) = match pending.and_then(|pending| pending.wait()) {
                Ok(buffer) => (true, buffer),
                Err(failed) => (false, reclaimed(failed)),
            };
            assert_is_back(&group, &cuts, &buffer);
            if is_complete {
                assert_is_gathered(&group, &cuts, &buffer);
            }
            // A rank that has all may not have heard of the end.
            while world.next_epoch() == 0 {
                thread::yield_now();
            }
            let pending = group.gather_parts(tag(), Arc::clone(&cuts), buffer).expect("issued");
            assert_is_gathered(&group, &cuts, &pending.wait().expect("all come"));
            is_complete
        });
        assert!(complete.iter().all(|it| *it == complete[0]), "{complete:?}");
    }
}

#[test]
fn a_buffer_comes_back_when_a_peer_is_lost() {
    let cuts = uneven();
    results(3, |world| {
        let group = world.world_group(Channel::Gather);
        if group.index() == 2 {
            return;
        }
        let pending = group.gather_parts(tag(), Arc::clone(&cuts), precious(&group, &cuts));
        let failed = pending.and_then(|pending| pending.wait()).expect_err("rank 2 has left");
        assert!(failed.error.is_fatal(), "{failed:?}");
        assert_is_back(&group, &cuts, &reclaimed(failed));
        // The world is over: the next call is refused, and loses nothing either.
        let refused = group.gather_parts(tag(), Arc::clone(&cuts), precious(&group, &cuts));
        assert_is_back(&group, &cuts, &reclaimed(refused.expect_err("the world is over")));
    });
}

#[test]
fn a_buffer_comes_back_from_faults() {
    let cuts = uneven();
    for kind in [FaultKind::Error, FaultKind::OutOfMemory] {
        let fault = Fault::at(Rank::new(1), 3, Stage::GatherSlices, kind);
        let options = WorldOptions { faults: vec![fault], ..WorldOptions::default() };
        let ends = outcomes(3, options, |world| {
            world.set_step(3);
            let group = world.world_group(Channel::Gather);
            let tag = Tag::new(Stage::GatherSlices).step(3);
            let pending = group.gather_parts(tag, Arc::clone(&cuts), precious(&group, &cuts));
            if group.index() == 1 {
                let refused = pending.as_ref().expect_err("a fault");
                let reason = refused.error.to_string();
                world.abort_step(StepFailure { step: 3, reason });
            }
            let failed = pending.and_then(|pending| pending.wait());
            let buffer = reclaimed(failed.expect_err("rank 1 does not come"));
            assert_is_back(&group, &cuts, &buffer);
            gathered_again(&world, &group, &cuts, buffer);
        });
        assert!(ends.into_iter().all(|end| end.is_ok()), "no rank panics");
    }
}

/// A gradient that reclaims a buffer while it is lent.
#[derive(Debug)]
struct Reclaiming(Mutex<Option<Ungathered<HostBuffer>>>);

impl GradientValues for Reclaiming {
    fn len(&self) -> usize {
        1
    }

    fn read(&self, _: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        let mut failed = self.0.lock().expect("no panic");
        let reclaimed = failed.take().expect("it is read once").reclaim();
        *failed = Some(reclaimed.expect_err("it may not wait"));
        visit(Values::F32(&[1.0]));
    }
}

#[test]
fn the_work_of_another_operation_cannot_reclaim_and_loses_nothing() {
    let world = World::single();
    let group = world.world_group(Channel::User);
    let refused = group.gather_parts(tag(), [1].into(), HostBuffer::F32(vec![5.0]));
    let refused = refused.expect_err("the cuts are no cuts");
    let gradient = Arc::new(Reclaiming(Mutex::new(Some(refused))));
    let unit = Unit::new("unit").param(Param::new("w", [1]));
    let layout = Arc::new(UnitLayout::new(&unit, 1).expect("a layout"));
    let partial = vec![0.0; layout.trainable().shard_len];
    let gradients = vec![Some(Arc::clone(&gradient) as Arc<dyn GradientValues>)];
    let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
    let accumulator = Accumulator { partial, fold: Fold::Replace };
    let reduced = group.reduce_unit(tag(), layout, contribution, accumulator);
    reduced.and_then(|pending| pending.wait()).expect("reduced");
    let failed = gradient.0.lock().expect("no panic").take().expect("it was read");
    assert!(matches!(failed.error, Error::Call(CallError::Reentrant { .. })), "{failed:?}");
    assert_eq!(reclaimed(failed), HostBuffer::F32(vec![5.0]));
}
