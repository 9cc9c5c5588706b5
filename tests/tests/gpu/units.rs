//! Gathers and reductions of units on a device, beside those on the host: ranks are threads that
//! share the device.

use std::sync::Arc;

use hsdp_comm::{
    Accumulator, Channel, Contribution, DeviceAccumulator, Error, Group, NonFiniteAt, Scaling,
    Stage, Tag, World, WorldOptions,
};
use hsdp_kernels::cuda::{DeviceBuffer, FirstFound, Noted, Stream};
use hsdp_kernels::{Divisor, Fold, GradientValues, HostBuffer, SharedBuffer, Values, Wire, cast};
use hsdp_sharding::{DType, Param, ParamSlot, Role, Unit, UnitLayout};
use hsdp_tests::support::worlds::{launched, results};

use super::numbers::{DTYPES, of, ordinary};
use super::{PATIENCE, assert_same, device, download, stream, upload};

const SIZES: [usize; 4] = [1, 2, 3, 5];

/// Parameters that straddle shards, one element, a frozen one between trainable ones, whole rows.
fn layout(shards: usize) -> Arc<UnitLayout> {
    let unit = Unit::new("unit")
        .param(Param::new("weight", [37, 19]))
        .param(Param::new("scale", [1]))
        .param(Param::new("table", [211]).frozen())
        .param(Param::new("rows", [40, 50]).rows(8))
        .param(Param::new("wide", [9001]));
    Arc::new(UnitLayout::new(&unit, shards).expect("a layout"))
}

fn tag(microbatch: usize) -> Tag {
    Tag::new(Stage::Reduce).step(3).microbatch(microbatch)
}

fn in_dtype(dtype: DType, values: &[f32]) -> HostBuffer {
    let mut buffer = HostBuffer::zeros(dtype, values.len()).expect("memory");
    cast(buffer.values_mut(), values);
    buffer
}

/// The wide dtypes of a reduction: wire, divisor before, divisor after.
fn scalings() -> impl Iterator<Item = Scaling> {
    let by = |divisor: f32| Divisor::new(divisor).expect("a divisor");
    [(Wire::F32, 1.0, 1.0), (Wire::BF16, 2.0, 3.0), (Wire::F16, 8.0, 0.5)]
        .map(|(wire, pre, post)| Scaling { wire, pre: by(pre), post: by(post) })
        .into_iter()
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_member_gets_every_shard_where_it_belongs() {
    for (size, dtype) in SIZES.into_iter().zip(DTYPES.into_iter().cycle()) {
        let layout = layout(size);
        let gathered = results(size, |world| {
            let group = world.world_group(Channel::Gather);
            let shard = of(dtype, group.index() as u64, layout.shard_len());
            let bytes = || world.ledger().channel(Channel::Gather).bytes;
            let zeros = |slot: &ParamSlot| HostBuffer::zeros(dtype, slot.len).expect("memory");
            let targets: Vec<_> = layout.params().iter().map(zeros).collect();
            let shared = SharedBuffer::from(shard.clone());
            let pending = group.gather_unit(tag(0), Arc::clone(&layout), shared, targets);
            let expected = pending.and_then(|pending| pending.wait()).expect("gathered");
            let on_host = bytes();
            let stream = stream();
            let shard = Arc::new(upload(&stream, shard.values()));
            let full = buffer(dtype, layout.full_len());
            let pending = group.gather_unit_on_device(tag(0), Arc::clone(&layout), shard, full);
            let full = pending.and_then(|pending| pending.wait()).expect("gathered");
            assert_eq!(bytes(), on_host + on_host, "bytes of {size} ranks");
            (expected, download(&stream, &full))
        });
        for (expected, full) in &gathered {
            for (slot, expected) in layout.params().iter().zip(expected.iter()) {
                let found = full.values().slice(slot.range());
                assert_same(found, expected.values(), &format!("{} of {size} ranks", slot.name));
            }
        }
    }
}

fn buffer(dtype: DType, len: usize) -> DeviceBuffer {
    DeviceBuffer::new(&device(), dtype, len, "a test").expect("memory")
}

/// Some gradients absent, and of any dtype; the same on the host, and where every second one lies
/// on the device.
fn gradients(layout: &UnitLayout, seed: u64) -> [Vec<Option<Arc<dyn GradientValues>>>; 2] {
    let stream = stream();
    let mut all = [Vec::new(), Vec::new()];
    for (at, slot) in layout.params().iter().enumerate() {
        let seed = seed * 10 + at as u64;
        let absent = slot.role == Role::Frozen || seed % 7 == 3;
        let values = in_dtype(DTYPES[at % 3], &ordinary(seed, slot.len));
        let there: Arc<dyn GradientValues> = match at % 2 {
            0 => Arc::new(upload(&stream, values.values())),
            _ => Arc::new(values.clone()),
        };
        all[0].push((!absent).then(|| Arc::new(values) as Arc<dyn GradientValues>));
        all[1].push((!absent).then_some(there));
    }
    all
}

fn reduced(
    group: &Group,
    layout: &Arc<UnitLayout>,
    contribution: Contribution,
    accumulator: Accumulator,
) -> (Vec<f32>, Option<NonFiniteAt>) {
    let pending = group.reduce_unit(tag(0), Arc::clone(layout), contribution, accumulator);
    let reduced = pending.and_then(|pending| pending.wait()).expect("reduced");
    (reduced.partial, reduced.non_finite)
}

/// A partial on a device, and what is noted of it.
struct OnDevice {
    partial: DeviceBuffer,
    noted: Noted,
}

impl OnDevice {
    fn new(stream: &Stream, len: usize) -> Self {
        let partial = upload(stream, Values::F32(&vec![7.0; len]));
        Self { partial, noted: Noted::new(stream).expect("memory") }
    }

    fn reduce(
        self,
        group: &Group,
        layout: &Arc<UnitLayout>,
        microbatch: usize,
        contribution: Contribution,
        fold: Fold,
    ) -> Result<Self, Error> {
        let Self { partial, noted } = self;
        let accumulator = DeviceAccumulator { partial, fold, noted };
        let layout = Arc::clone(layout);
        let pending =
            group.reduce_unit_on_device(tag(microbatch), layout, contribution, accumulator)?;
        let reduced = pending.wait()?;
        Ok(Self { partial: reduced.partial, noted: reduced.noted })
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn microbatches_are_summed_to_the_bits_of_the_host() {
    for (size, scaling) in SIZES.into_iter().flat_map(|size| scalings().map(move |it| (size, it))) {
        let layout = layout(size);
        let len = layout.trainable().shard_len;
        let sums = results(size, |world| {
            let group = world.world_group(Channel::Reduce);
            let stream = stream();
            let mut host = vec![7.0; len];
            let mut there = OnDevice::new(&stream, len);
            for (microbatch, fold) in [Fold::Replace, Fold::Add, Fold::Add].into_iter().enumerate()
            {
                let seed = 100 * world.rank().index() + microbatch;
                let [on_host, on_device] = gradients(&layout, seed as u64);
                let contribution = |gradients| Contribution { gradients, scaling };
                let accumulator = Accumulator { partial: host, fold };
                let before = world.ledger().channel(Channel::Reduce).bytes;
                host = reduced(&group, &layout, contribution(on_host), accumulator).0;
                let after = world.ledger().channel(Channel::Reduce).bytes;
                there = there
                    .reduce(&group, &layout, microbatch, contribution(on_device), fold)
                    .expect("reduced");
                let bytes = world.ledger().channel(Channel::Reduce).bytes;
                assert_eq!(bytes - after, after - before, "bytes of {size} ranks");
            }
            (host, download(&stream, &there.partial))
        });
        for (rank, (host, there)) in sums.iter().enumerate() {
            let what = format!("{scaling:?}, rank {rank} of {size}");
            assert_same(there.values(), Values::F32(host), &what);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn partials_of_replicas_are_summed_to_the_bits_of_the_host() {
    for (size, scaling) in SIZES.into_iter().flat_map(|size| scalings().map(move |it| (size, it))) {
        let sums = results(size, |world| {
            let group = world.world_group(Channel::AllReduce);
            let stream = stream();
            let mine = ordinary(world.rank().index() as u64, 1057);
            let there = upload(&stream, Values::F32(&mine));
            let pending = group.all_reduce_scaled(tag(0), mine, scaling);
            let host = pending.and_then(|pending| pending.wait()).expect("summed");
            let bytes = world.ledger().channel(Channel::AllReduce).bytes;
            let pending = group.all_reduce_scaled_on_device(tag(0), there, scaling);
            let there = pending.and_then(|pending| pending.wait()).expect("summed");
            assert_eq!(world.ledger().channel(Channel::AllReduce).bytes, bytes + bytes);
            (host, download(&stream, &there))
        });
        for (host, there) in &sums {
            assert_same(there.values(), Values::F32(host), &format!("{scaling:?}, {size} ranks"));
        }
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn what_is_not_finite_is_noted_with_its_microbatch() {
    let layout = layout(3);
    const WIDE: usize = 4;
    let wide = layout.params()[WIDE].clone();
    let notes = results(3, |world| {
        let group = world.world_group(Channel::Reduce);
        let stream = stream();
        let mut there = OnDevice::new(&stream, layout.trainable().shard_len);
        for microbatch in 0..3 {
            let mut gradients = gradients(&layout, 1)[1].clone();
            if (world.rank().index(), microbatch) == (1, 1) {
                let mut values = ordinary(5, wide.len);
                values[4000] = f32::INFINITY;
                gradients[WIDE] = Some(Arc::new(values));
            }
            let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
            let fold = if microbatch == 0 { Fold::Replace } else { Fold::Add };
            there = there
                .reduce(&group, &layout, microbatch, contribution, fold)
                .expect("an infinity is a number like others");
        }
        stream.read_noted(&[&there.noted], PATIENCE).expect("read")[0]
    });
    let at = wide.start + 4000;
    let len = layout.trainable().shard_len;
    for (rank, noted) in notes.into_iter().enumerate() {
        let found = |index| Some(FirstFound { round: 1, index });
        assert_eq!(noted.contribution, found(at).filter(|_| rank == 1));
        assert_eq!(noted.sum, found(at % len).filter(|_| rank == at / len), "of rank {rank}");
    }
}

/// Of one rank's part that fails, all are told alike.
#[test]
#[ignore = "needs a CUDA device"]
fn a_rank_whose_gradient_panics_is_named() {
    #[derive(Debug)]
    struct Broken(usize);
    impl GradientValues for Broken {
        fn len(&self) -> usize {
            self.0
        }
        fn read(&self, _: std::ops::Range<usize>, _: &mut dyn FnMut(Values<'_>)) {
            panic!("the gradient is gone");
        }
    }
    let layout = layout(2);
    let outcome = launched(2, WorldOptions::default(), |world: World| {
        let group = world.world_group(Channel::Reduce);
        let mut gradients = gradients(&layout, 1)[1].clone();
        if world.rank().index() == 1 {
            gradients[0] = Some(Arc::new(Broken(layout.params()[0].len)));
        }
        let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
        let there = OnDevice::new(&stream(), layout.trainable().shard_len);
        there.reduce(&group, &layout, 0, contribution, Fold::Replace).map(drop)
    });
    for outcome in outcome {
        let said = outcome.expect("no rank panics itself").expect_err("the world is over");
        assert!(said.to_string().starts_with("world aborted: rank 1, step 0"), "{said}");
        assert!(said.to_string().ends_with("it panicked: the gradient is gone"), "{said}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn buffers_that_do_not_fit_are_refused_by_name() {
    let group = World::single().world_group(Channel::Gather);
    let layout = layout(1);
    let gather = |shard: DeviceBuffer, full: DeviceBuffer| {
        let pending =
            group.gather_unit_on_device(tag(0), Arc::clone(&layout), Arc::new(shard), full);
        pending.map(drop).expect_err("it does not fit").to_string()
    };
    let shard = layout.shard_len();
    let full = layout.full_len();
    assert_eq!(
        gather(buffer(DType::F32, shard - 1), buffer(DType::F32, full)),
        format!("all_gather on rank 0: the shard has {} elements, expected {shard}", shard - 1)
    );
    assert_eq!(
        gather(buffer(DType::F32, shard), buffer(DType::F32, full + 1)),
        format!("all_gather on rank 0: the whole unit has {} elements, expected {full}", full + 1)
    );
    assert_eq!(
        gather(buffer(DType::F32, shard), buffer(DType::F16, full)),
        "all_gather on rank 0: f16 elements: not the dtype of the shard"
    );
    let halves =
        group.all_reduce_scaled_on_device(tag(0), buffer(DType::F16, 8), Scaling::on(Wire::F32));
    let said = halves.map(drop).expect_err("partials are f32").to_string();
    assert_eq!(said, "all_reduce on rank 0: f16 elements: partials are f32");
}
