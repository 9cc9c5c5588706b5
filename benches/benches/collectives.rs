//! The collectives of the local flavour, on 2 and 4 ranks that are threads.
//!
//! ```text
//! cargo bench -p hsdp-benches --bench collectives
//! ```
//!
//! A time is that of one call and its wait, in a row of them inside one world, on the slowest rank. A size is a part: what a
//! rank brings to an all_gather, gets from a reduce_scatter, or has in an all_reduce. A throughput counts the bytes that a rank
//! receives from others, as the ledger does. Each result is checked before it is timed.
//!
//! Calls take their input and give an output. An all_reduce goes on in the buffer that it gave back, and an all_gather in the
//! beginning of it; a reduce_scatter needs a copy of its input for each call, and the copy is in its time. The two calls on
//! whole units, of which the runtime's steps are made, copy and allocate nothing.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use hsdp_comm::{
    Accumulator, Channel, Contribution, Error, Group, Pending, Reduction, Scaling, Tag, world,
};
use hsdp_kernels::{Fold, HostBuffer, Wire};
use hsdp_sharding::{DType, Param, Unit, UnitLayout, balanced};

const RANKS: [usize; 2] = [2, 4];
const PARTS: [(&str, usize); 3] = [("8 B", 8), ("64 KiB", 64 << 10), ("16 MiB", 16 << 20)];
/// 256 Ki elements.
const UNIT: [usize; 2] = [512, 512];

/// Makes so many calls on f32 parts of so many elements, and gives their time.
type Calls = fn(&Group, usize, u64) -> Duration;
/// Bytes that a rank of so many receives, for a part of so many elements.
type Received = fn(usize, usize) -> usize;

const COLLECTIVES: [(&str, Calls, Received); 3] = [
    ("all_gather", all_gather, received_by_parts),
    ("reduce_scatter", reduce_scatter, received_by_parts),
    ("all_reduce", all_reduce, received_by_all_reduce),
];

fn collectives(criterion: &mut Criterion) {
    for (name, calls, received) in COLLECTIVES {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(20);
        for (ranks, (size, bytes)) in
            RANKS.iter().flat_map(|ranks| PARTS.map(|part| (*ranks, part)))
        {
            let part = bytes / size_of::<f32>();
            group.throughput(Throughput::Bytes(received(ranks, part) as u64));
            bench(&mut group, size, ranks, &|group, count| calls(group, part, count));
        }
    }
}

fn units(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("unit of 256 Ki elements");
    group.sample_size(20);
    for ranks in RANKS {
        let unit = Unit::new("unit").param(Param::new("weight", UNIT));
        let layout = Arc::new(UnitLayout::new(&unit, ranks).expect("a layout"));
        let received =
            |dtype: DType| ((ranks - 1) * layout.shard_len() * dtype.size_bytes()) as u64;
        for dtype in [DType::F32, DType::BF16] {
            group.throughput(Throughput::Bytes(received(dtype)));
            bench(&mut group, &format!("gather {dtype}"), ranks, &|group, count| {
                gather_unit(group, &layout, dtype, count)
            });
        }
        for wire in [Wire::F32, Wire::BF16] {
            group.throughput(Throughput::Bytes(received(wire.dtype())));
            bench(&mut group, &format!("reduce {wire} wire"), ranks, &|group, count| {
                reduce_unit(group, &layout, wire, count)
            });
        }
    }
}

criterion_group!(benches, collectives, units);
criterion_main!(benches);

/// Times what all ranks of a world do together.
fn bench(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    ranks: usize,
    calls: &(dyn Fn(&Group, u64) -> Duration + Sync),
) {
    let on_all = |count| {
        let times = world(ranks, |world| calls(&world.world_group(Channel::User), count));
        times.into_iter().max().unwrap_or_default()
    };
    let id = BenchmarkId::new(name, format!("{ranks} ranks"));
    group.bench_function(id, |bencher| bencher.iter_custom(on_all));
}

/// The time of so many calls, which all ranks begin together.
fn timed(group: &Group, count: u64, mut call: impl FnMut()) -> Duration {
    wait(group.barrier(Tag::default()));
    let start = Instant::now();
    (0..count).for_each(|_| call());
    start.elapsed()
}

fn wait<T>(issued: Result<Pending<T>, Error>) -> T {
    issued.and_then(Pending::wait).expect("a collective of this bench")
}

/// What this rank brings: its number, counted from 1.
fn brought(group: &Group, len: usize) -> Vec<f32> {
    vec![(1..).map(|number| number as f32).nth(group.index()).unwrap_or_default(); len]
}

/// What all of them add up to.
fn total(group: &Group) -> f32 {
    (group.size() * (group.size() + 1) / 2) as f32
}

fn received_by_parts(ranks: usize, part: usize) -> usize {
    (ranks - 1) * part * size_of::<f32>()
}

/// The others' contributions to rank 0's share, and the sums of what it does not sum itself.
fn received_by_all_reduce(ranks: usize, len: usize) -> usize {
    let own = balanced(len, ranks, 0).len();
    ((ranks - 1) * own + (len - own)) * size_of::<f32>()
}

fn all_gather(group: &Group, part: usize, count: u64) -> Duration {
    let mut values = brought(group, part);
    let gathered = wait(group.all_gather(Tag::default(), values.clone()));
    let wanted = (0..group.size() * part).map(|index| (index / part + 1) as f32);
    assert!(gathered.into_iter().eq(wanted));
    timed(group, count, || {
        values = wait(group.all_gather(Tag::default(), mem::take(&mut values)));
        values.truncate(part);
    })
}

fn reduce_scatter(group: &Group, part: usize, count: u64) -> Duration {
    let values = brought(group, group.size() * part);
    let call = || wait(group.reduce_scatter(Tag::default(), Reduction::Sum, values.clone()));
    assert_eq!(call(), vec![total(group); part]);
    timed(group, count, || drop(call()))
}

fn all_reduce(group: &Group, len: usize, count: u64) -> Duration {
    let call = |values| wait(group.all_reduce(Tag::default(), Reduction::Sum, values));
    assert_eq!(call(brought(group, len)), vec![total(group); len]);
    // Zeros stay zeros.
    let mut values = vec![0.0; len];
    timed(group, count, || values = call(mem::take(&mut values)))
}

fn gather_unit(group: &Group, layout: &Arc<UnitLayout>, dtype: DType, count: u64) -> Duration {
    let shard = Arc::new(brought(group, layout.shard_len()));
    let call = |targets| {
        let (layout, shard) = (Arc::clone(layout), Arc::clone(&shard));
        wait(group.gather_unit(Tag::default(), layout, shard, targets))
    };
    let len = UNIT[0] * UNIT[1];
    let mut targets = call(vec![HostBuffer::zeros(dtype, len).expect("a dtype of parameters")]);
    let wanted = (0..len).map(|index| (index / layout.shard_len() + 1) as f32);
    assert!(targets[0].values().to_f32().into_iter().eq(wanted));
    timed(group, count, || targets = call(mem::take(&mut targets)))
}

fn reduce_unit(group: &Group, layout: &Arc<UnitLayout>, wire: Wire, count: u64) -> Duration {
    let gradient = Arc::new(brought(group, UNIT[0] * UNIT[1]));
    let call = |partial| {
        let contribution =
            Contribution { gradients: vec![Some(gradient.clone())], scaling: Scaling::on(wire) };
        let accumulator = Accumulator { partial, fold: Fold::Replace };
        wait(group.reduce_unit(Tag::default(), Arc::clone(layout), contribution, accumulator))
            .partial
    };
    let mut partial = call(vec![0.0; layout.trainable().shard_len]);
    assert!(partial.iter().all(|sum| *sum == total(group)));
    timed(group, count, || partial = call(mem::take(&mut partial)))
}
