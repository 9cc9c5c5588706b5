//! The calls on whole units, against loops over single elements: equal bit for bit.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::results;
use half::{bf16, f16};
use hsdp_comm::{Accumulator, Channel, Contribution, Scaling, Stage, Tag, World};
use hsdp_kernels::{Divisor, Fold, GradientValues, HostBuffer, SharedBuffer, Values, Wire, cast};
use hsdp_sharding::{DType, Param, ParamSlot, Role, Unit, UnitLayout};

mod non_finite;
mod refusals;

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Parameters that straddle shards, one element, a prime, a frozen one between trainable ones; the last is large
/// enough for many blocks.
fn unit() -> Unit {
    Unit::new("unit")
        .param(Param::new("weight", [37, 19]))
        .param(Param::new("scale", [1]))
        .param(Param::new("table", [211]).frozen())
        .param(Param::new("rows", [40, 50]).rows(8))
        .param(Param::new("wide", [90_001]))
}

fn layout(size: usize) -> Arc<UnitLayout> {
    Arc::new(UnitLayout::new(&unit(), size).expect("a layout"))
}

fn tag() -> Tag {
    Tag::new(Stage::Reduce).step(3).microbatch(1)
}

/// A number that depends on all three, of any size and sign, inexact in every dtype.
fn noise(rank: usize, param: usize, place: usize) -> f32 {
    let mixed = (rank * 7 + param * 1_000_003 + place).wrapping_mul(2_654_435_761) % 100_003;
    (f32::from(u16::try_from(mixed % 50_021).expect("below 65536")) - 25_000.0) / 977.0
}

fn full(rank: usize, param: usize, len: usize) -> Vec<f32> {
    (0..len).map(|place| noise(rank, param, place)).collect()
}

/// The shard that holds `parameters`, cut out element by element.
fn shard_of(layout: &UnitLayout, index: usize, parameters: &[Vec<f32>]) -> Vec<f32> {
    let mut shard = vec![0.0; layout.shard_len()];
    for piece in layout.pieces(index) {
        shard[piece.shard_range()].copy_from_slice(&parameters[piece.param][piece.param_range()]);
    }
    shard
}

fn rounded(dtype: DType, value: f32) -> f32 {
    Wire::try_from(dtype).expect("a real dtype").round(value)
}

/// These numbers in a dtype.
fn shared(dtype: DType, values: &[f32]) -> SharedBuffer {
    let mut buffer = HostBuffer::zeros(dtype, values.len()).expect("a real dtype");
    cast(buffer.values_mut(), values);
    buffer.into()
}

fn holders(buffer: &SharedBuffer) -> usize {
    match buffer {
        SharedBuffer::F32(values) => Arc::strong_count(values),
        SharedBuffer::F16(values) => Arc::strong_count(values),
        SharedBuffer::BF16(values) => Arc::strong_count(values),
    }
}

#[test]
fn gather_unit_copies_every_shard_into_every_members_parameters() {
    for (size, dtype) in
        SIZES.into_iter().zip([DType::F32, DType::BF16, DType::F16].into_iter().cycle())
    {
        let layout = layout(size);
        let parameters: Vec<Vec<f32>> =
            layout.params().iter().enumerate().map(|(at, slot)| full(0, at, slot.len)).collect();
        let gathered = results(size, |world| {
            let group = world.world_group(Channel::Gather);
            let shard = shared(dtype, &shard_of(&layout, group.index(), &parameters));
            let zeros = |slot: &ParamSlot| HostBuffer::zeros(dtype, slot.len).expect("real");
            let targets = layout.params().iter().map(zeros).collect();
            let pending = group.gather_unit(tag(), Arc::clone(&layout), shard.clone(), targets);
            let gathered = pending.and_then(|pending| pending.wait()).expect("gathered");
            assert_eq!(holders(&shard), 1, "nobody reads the shard any more");
            gathered
        });
        for gathered in gathered {
            for (buffer, parameter) in gathered.iter().zip(&parameters) {
                assert_eq!(buffer.dtype(), dtype);
                let expected: Vec<f32> =
                    parameter.iter().map(|value| rounded(dtype, *value)).collect();
                assert_eq!(buffer.values().to_f32(), expected, "{dtype}, {size} ranks");
            }
        }
    }
}

#[test]
fn gather_unit_shared_fills_one_holder_for_all_members_of_all_replicas() {
    for (replicas, shards) in [(1, 1), (1, 3), (2, 2), (3, 1)] {
        let layout = layout(shards);
        let parameters: Vec<Vec<f32>> =
            layout.params().iter().enumerate().map(|(at, slot)| full(0, at, slot.len)).collect();
        let gathered = results(replicas * shards, |world| {
            let group = world.world_group(Channel::Gather);
            let shard = Arc::new(shard_of(&layout, group.index() % shards, &parameters));
            let zeros = |slot: &ParamSlot| HostBuffer::zeros(DType::F32, slot.len).expect("real");
            let holder = (group.index() == 0)
                .then(|| Arc::new(Holder(layout.params().iter().map(zeros).collect())));
            let pending = group.gather_unit_shared(tag(), Arc::clone(&layout), shard, holder);
            let holder = pending.and_then(|pending| pending.wait()).expect("gathered");
            (holder.expect("nothing was skipped"), world.ledger().channel(Channel::Gather).bytes)
        });
        for (holder, _) in &gathered {
            assert!(Arc::ptr_eq(holder, &gathered[0].0));
            for (buffer, parameter) in holder.0.iter().zip(&parameters) {
                assert_eq!(&buffer.values().to_f32(), parameter, "{replicas}x{shards}");
            }
        }
        let foreign = (shards - 1) * layout.shard_len() * 4;
        let received = gathered.iter().map(|(_, bytes)| bytes.get());
        let expected =
            (0..replicas * shards).map(|rank| if rank == 0 { foreign as u64 } else { 0 });
        assert_eq!(received.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    }
}

/// A holder that lets go of something else when it is dropped.
struct Tied {
    targets: Vec<HostBuffer>,
    _tie: Arc<()>,
}

impl AsMut<Vec<HostBuffer>> for Tied {
    fn as_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.targets
    }
}

#[test]
fn gather_unit_shared_keeps_nothing_that_a_member_does_not_ask_for() {
    let layout = layout(2);
    let kept = results(2, |world| {
        let group = world.world_group(Channel::Gather);
        let zeros = |slot: &ParamSlot| HostBuffer::zeros(DType::F32, slot.len).expect("real");
        let tie = Arc::new(());
        let holder = (group.index() == 0).then(|| {
            let targets = layout.params().iter().map(zeros).collect();
            Arc::new(Tied { targets, _tie: Arc::clone(&tie) })
        });
        let shard = Arc::new(vec![0.0_f32; layout.shard_len()]);
        let pending = group.gather_unit_shared(tag(), Arc::clone(&layout), shard, holder);
        let pending = pending.expect("issued");
        match world.rank().index() {
            0 => drop(pending.wait().expect("gathered")),
            _ => drop(pending),
        }
        let met = world.world_group(Channel::User).barrier(tag()).and_then(|it| it.wait());
        met.expect("both are there");
        // The thread that did the work lets go after the members have gone on.
        let released = Instant::now() + Duration::from_secs(10);
        while Arc::strong_count(&tie) > 1 && Instant::now() < released {
            thread::yield_now();
        }
        Arc::strong_count(&tie) - 1
    });
    assert_eq!(kept, [0, 0]);
}

#[test]
fn gather_unit_shared_refuses_a_holder_too_many_or_too_few() {
    results(2, |world| {
        let group = world.world_group(Channel::Gather);
        let layout = layout(2);
        let shard = Arc::new(vec![0.0; layout.shard_len()]);
        let refused = |holder| {
            let shard = Arc::clone(&shard);
            let refused = group.gather_unit_shared(tag(), Arc::clone(&layout), shard, holder);
            refused.expect_err("the first brings the holder, alone").to_string()
        };
        let holder = Arc::new(Holder(Vec::new()));
        let wrong = (group.index() == 1).then(|| Arc::clone(&holder));
        let error = refused(wrong);
        assert!(error.contains("the list of holders"), "{error}");
        if group.index() == 0 {
            let error = refused(Some(Arc::clone(&holder)));
            assert!(error.contains("the list of the holder's handles"), "{error}");
        }
    });
}

/// Holds the buffers that all members read.
struct Holder(Vec<HostBuffer>);

impl AsMut<Vec<HostBuffer>> for Holder {
    fn as_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.0
    }
}

/// Whether rank `rank` has a gradient for a parameter: some have none on some ranks, `scale` on none.
fn is_present(rank: usize, param: usize) -> bool {
    param != 1 && !(rank + param).is_multiple_of(4)
}

fn gradient(rank: usize, param: usize, len: usize) -> Arc<dyn GradientValues> {
    let values = full(rank, param, len);
    match param {
        0 => Arc::new(values),
        3 => Arc::new(values.into_iter().map(f16::from_f32).collect::<Vec<_>>()),
        _ => Arc::new(values.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
    }
}

fn lent(gradient: &dyn GradientValues) -> Vec<f32> {
    let mut lent = Vec::new();
    gradient.read(0..gradient.len(), &mut |values| lent = values.to_f32());
    lent
}

/// How a reduction is scaled, as plain numbers.
#[derive(Clone, Copy)]
struct Case {
    wire: Wire,
    pre: f32,
    post: f32,
    fold: Fold,
}

impl Case {
    fn scaling(self) -> Scaling {
        Scaling { wire: self.wire, pre: divisor(self.pre), post: divisor(self.post) }
    }
}

const CASES: [Case; 4] = [
    Case { wire: Wire::F32, pre: 1.0, post: 1.0, fold: Fold::Replace },
    Case { wire: Wire::BF16, pre: 1.0, post: 3.0, fold: Fold::Add },
    Case { wire: Wire::F16, pre: 4.0, post: 2.0, fold: Fold::Replace },
    Case { wire: Wire::BF16, pre: 3.0, post: 0.5, fold: Fold::Add },
];

fn divisor(value: f32) -> Divisor {
    Divisor::new(value).expect("a divisor")
}

/// The result for one element: members in order, rounded and summed in f32.
fn reduced(case: Case, before: f32, contributions: &[f32]) -> f32 {
    let sum = match contributions {
        [alone] => *alone / (case.pre * case.post),
        several => {
            let mut contributions = several.iter().map(|value| case.wire.round(value / case.pre));
            let first = contributions.next().expect("a group has members");
            contributions.fold(first, |sum, value| sum + value) / case.post
        }
    };
    if case.fold == Fold::Add { before + sum } else { sum }
}

#[test]
fn reduce_unit_sums_gradients_where_they_lie() {
    for (size, case) in SIZES.into_iter().flat_map(|size| CASES.map(|case| (size, case))) {
        let layout = layout(size);
        let gradients = |rank: usize| -> Vec<Option<Arc<dyn GradientValues>>> {
            let trainable = |param: usize| layout.params()[param].role == Role::Trainable;
            let slots = layout.params().iter().enumerate();
            slots
                .map(|(at, slot)| {
                    let present = trainable(at) && is_present(rank, at);
                    present.then(|| gradient(rank, at, slot.len))
                })
                .collect()
        };
        let partials =
            results(size, |world| reduce(&world, &layout, gradients(world.rank().index()), case));

        let lent: Vec<Vec<Option<Vec<f32>>>> = (0..size)
            .map(|rank| gradients(rank).iter().map(|it| it.as_deref().map(lent)).collect())
            .collect();
        for (rank, partial) in partials.into_iter().enumerate() {
            let base = if case.fold == Fold::Add { 0.5 } else { 0.0 };
            let mut expected = vec![base; layout.trainable().shard_len];
            let trainable = layout.trainable().shard_len;
            for piece in layout.pieces(rank).filter(|it| it.shard_start < trainable) {
                for (at, place) in piece.shard_range().zip(piece.param_range()) {
                    let of =
                        |rank: usize| lent[rank][piece.param].as_ref().map_or(0.0, |it| it[place]);
                    let contributions: Vec<f32> = (0..size).map(of).collect();
                    expected[at] = reduced(case, 0.5, &contributions);
                }
            }
            assert!(same_bits(&partial, &expected), "{} ranks, wire {}", size, case.wire);
        }
    }
}

fn reduce(
    world: &World,
    layout: &Arc<UnitLayout>,
    gradients: Vec<Option<Arc<dyn GradientValues>>>,
    case: Case,
) -> Vec<f32> {
    let group = world.world_group(Channel::Reduce);
    let held: Vec<_> = gradients.iter().flatten().cloned().collect();
    let contribution = Contribution { gradients, scaling: case.scaling() };
    let partial = vec![0.5; layout.trainable().shard_len];
    let accumulator = Accumulator { partial, fold: case.fold };
    let pending = group.reduce_unit(tag(), Arc::clone(layout), contribution, accumulator);
    let reduced = pending.and_then(|pending| pending.wait()).expect("reduced");
    assert_eq!(reduced.non_finite, None);
    let partial = reduced.partial;
    assert!(
        held.iter().all(|it| Arc::strong_count(it) == 1),
        "gradients are dropped when they are read"
    );
    partial
}

fn same_bits(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(found, expected)| found.to_bits() == expected.to_bits())
}

#[test]
fn all_reduce_scaled_gives_everybody_the_same_bits() {
    for (size, case) in SIZES.into_iter().flat_map(|size| CASES.map(|case| (size, case))) {
        for len in [0, 1, 5, 30_011] {
            let sums = results(size, |world| {
                let group = world.world_group(Channel::AllReduce);
                let mine = full(world.rank().index(), 0, len);
                let pending = group.all_reduce_scaled(tag(), mine, case.scaling());
                pending.and_then(|pending| pending.wait()).expect("reduced")
            });
            let case = Case { fold: Fold::Replace, ..case };
            let all: Vec<Vec<f32>> = (0..size).map(|rank| full(rank, 0, len)).collect();
            let at = |place: usize| all.iter().map(|values| values[place]).collect::<Vec<_>>();
            let expected: Vec<f32> = (0..len).map(|place| reduced(case, 0.0, &at(place))).collect();
            assert!(
                sums.iter().all(|sum| same_bits(sum, &expected)),
                "{size} ranks, {len} elements"
            );
        }
    }
}

#[test]
fn f16_neither_overflows_nor_loses_what_pre_makes_room_for() {
    // 8 members with 60000 each: 480000 fits no f16, and is exact as a sum of f32 with pre 4 and post 1/4.
    let sums = results(8, |world| {
        let group = world.world_group(Channel::AllReduce);
        let values = vec![60_000.0, 2.0_f32.powi(-20)];
        let scaling = Scaling { wire: Wire::F16, pre: divisor(4.0), post: divisor(0.25) };
        let pending = group.all_reduce_scaled(tag(), values, scaling);
        pending.and_then(|pending| pending.wait()).expect("reduced")
    });
    assert!(sums.iter().all(|sum| *sum == [480_000.0, 8.0 * 2.0_f32.powi(-20)]));
}

/// A gradient that is lent twice, against the contract.
#[derive(Debug)]
struct Twice(Vec<f32>);

impl GradientValues for Twice {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(Values::F32(&self.0[range.clone()]));
        visit(Values::F32(&self.0[range]));
    }
}

/// A gradient that lends other elements than it is asked for, against the contract.
#[derive(Debug)]
struct Short(Vec<f32>);

impl GradientValues for Short {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        visit(Values::F32(&self.0[range.start..range.end - 1]));
    }
}

/// The error with which a reduction of gradients ends that are against the contract.
fn end_of_reduction(
    world: &World,
    layout: Arc<UnitLayout>,
    gradients: Vec<Option<Arc<dyn GradientValues>>>,
) -> String {
    let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
    let partial = vec![0.0; layout.trainable().shard_len];
    let accumulator = Accumulator { partial, fold: Fold::Replace };
    let group = world.world_group(Channel::Reduce);
    let issued = group.reduce_unit(tag(), layout, contribution, accumulator);
    issued.and_then(|pending| pending.wait()).expect_err("it ends").to_string()
}

/// Of few members, whose gradients are read at once, and of more.
#[test]
fn who_lends_too_few_elements_is_named_and_not_the_last_member() {
    for size in [2, 4, 6] {
        let ends = results(size, |world| {
            let layout = layout(size);
            let mut gradients = vec![None, None, None, None, None];
            let values = vec![1.0; 37 * 19];
            gradients[0] = Some(match world.rank().index() {
                0 => Arc::new(Short(values)) as Arc<dyn GradientValues>,
                _ => Arc::new(values),
            });
            end_of_reduction(&world, layout, gradients)
        });
        for end in ends {
            assert!(end.starts_with("world aborted: rank 0, step 0"), "{end}");
            assert!(end.contains("the gradient of parameter 0 was lent with"), "{end}");
        }
    }
}

#[test]
fn a_gradient_that_is_lent_twice_ends_the_world() {
    let ends = results(2, |world| {
        let layout = layout(2);
        let mut gradients = vec![None, None, None, None, None];
        if world.rank().index() == 1 {
            gradients[0] = Some(Arc::new(Twice(vec![1.0; 37 * 19])) as Arc<dyn GradientValues>);
        }
        end_of_reduction(&world, layout, gradients)
    });
    for end in ends {
        assert!(
            end.starts_with("world aborted: rank 1, step 0, last in reduce_scatter sum f32"),
            "{end}"
        );
        assert!(
            end.ends_with("it panicked: the gradient of parameter 0 was lent 2 times, not once"),
            "{end}"
        );
    }
}
