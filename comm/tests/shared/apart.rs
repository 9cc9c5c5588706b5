//! Ranks that share no memory get the bits that ranks with shared memory get, and learn of each
//! other's ends.
//!
//! `comm/tests/apart.sh` runs the program `worlds` in the same way.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use hsdp_comm::WorldError::Mismatch;
use hsdp_comm::{
    Accumulator, Between, Channel, Contribution, Error, Group, LedgerSnapshot, Lent, Reduction,
    Scaling, StepFailure, Tag, World, WorldOptions,
};
use hsdp_kernels::{Divisor, Element, Fold, GradientValues, HostBuffer, Wire};
use hsdp_sharding::{DType, Param, Unit, UnitLayout};

use crate::common::outcomes;

const SIZES: [usize; 4] = [2, 3, 5, 7];

fn run<T: Send>(size: usize, between: Between, rank: impl Fn(World) -> T + Sync) -> Vec<T> {
    let deadline = Duration::from_secs(20);
    let options = WorldOptions { between, deadline, ..WorldOptions::default() };
    outcomes(size, options, rank).into_iter().map(|it| it.expect("no rank panics")).collect()
}

/// The results of ranks are the same both ways, and so are their counts.
fn same<T: PartialEq + std::fmt::Debug + Send>(rank: impl Fn(&Group) -> Result<T, Error> + Sync) {
    for size in SIZES {
        let of = |between| -> Vec<(T, LedgerSnapshot)> {
            let ranks = run(size, between, |world| {
                let made = rank(&world.world_group(Channel::User))?;
                Ok::<_, Error>((made, world.ledger()))
            });
            ranks.into_iter().map(|it| it.expect("it succeeds")).collect()
        };
        assert_eq!(of(Between::Messages), of(Between::Memory), "{size} ranks");
    }
}

/// Numbers without a pattern, of which sums must be rounded.
fn noise(seed: usize, len: usize) -> Vec<f32> {
    let mut state = seed as u64 * 2 + 1;
    let next = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..len).map(next).collect()
}

fn of_dtype<T: Element>(make: impl Fn(f32) -> T + Copy + Sync) {
    let mine =
        |group: &Group, len| noise(group.index(), len).into_iter().map(make).collect::<Vec<T>>();
    let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
    for len in [0, 1, 1003] {
        same(|group| {
            let all = group.all_gather(Tag::default(), mine(group, len))?.wait()?;
            let sum = group.all_reduce(Tag::default(), Reduction::Sum, mine(group, len))?.wait()?;
            let parts = mine(group, len * group.size());
            let part = group.reduce_scatter(Tag::default(), Reduction::Max, parts)?.wait()?;
            let rooted = group.reduce(Tag::default(), 1, Reduction::Product, mine(group, len))?;
            let rooted = rooted.wait()?.unwrap_or_default();
            let told = group.broadcast(Tag::default(), 1, mine(group, len))?.wait()?;
            Ok([all, sum, part, rooted, told].map(|values| bits(&values)))
        });
    }
}

#[test]
fn collectives_of_every_dtype() {
    of_dtype(|value| value);
    of_dtype(f64::from);
    of_dtype(f16::from_f32);
    of_dtype(bf16::from_f32);
    of_dtype(|value| value.to_bits().cast_signed());
    of_dtype(|value| i64::from(value.to_bits()) << 7);
    of_dtype(f32::to_bits);
    of_dtype(|value| u64::from(value.to_bits()) << 7);
}

#[test]
fn collectives_that_deal_and_pass_on() {
    same(|group| {
        let index = group.index();
        let size = group.size();
        let dealt = (index == 0).then(|| noise(9, 4 * size));
        let dealt = group.scatter(Tag::default(), 0, dealt, 4)?.wait()?;
        let collected = group.gather(Tag::default(), 1, dealt.clone())?.wait()?;
        let send: Vec<usize> = (0..size).map(|to| (index + 2 * to) % 3).collect();
        let receive: Vec<usize> = (0..size).map(|from| (from + 2 * index) % 3).collect();
        let values = noise(index, send.iter().sum());
        let traded = group.all_to_all(Tag::default(), values, send, receive)?.wait()?;
        let to = (index + 1 < size).then_some(index + 1);
        let shifted = group.permute(Tag::default(), to, noise(index, 5))?.wait()?;
        let next = (index + 1) % size;
        let sent = group.send(Tag::default(), next, noise(index, 6))?;
        let received = group.recv::<f32>(Tag::default(), (index + size - 1) % size, 6)?.wait()?;
        sent.wait()?;
        let own = group.send(Tag::default(), index, noise(index, 2))?;
        let own_again = group.recv::<f32>(Tag::default(), index, 2)?.wait()?;
        own.wait()?;
        group.barrier(Tag::default())?.wait()?;
        let lent = Lent { source: noise(index, 3), target: vec![0.0; 3 * size] };
        let lent = group.all_gather_into(Tag::default(), lent)?.wait()?;
        Ok((dealt, collected, traded, shifted, received, own_again, lent))
    });
}

fn layout(size: usize) -> Arc<UnitLayout> {
    let unit =
        Unit::new("unit").param(Param::new("a", [33, 7])).param(Param::new("b", [5]).frozen());
    let unit = unit.param(Param::new("c", [100])).param(Param::new("d", [2100]));
    Arc::new(UnitLayout::new(&unit, size).expect("a layout"))
}

#[test]
fn units_are_gathered_with_the_same_bits() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        same(|group| {
            let layout = layout(group.size());
            let zeros = |len| HostBuffer::zeros(dtype, len).expect("real");
            let mut shard = zeros(layout.shard_len());
            hsdp_kernels::cast(shard.values_mut(), &noise(group.index(), layout.shard_len()));
            let targets: Vec<_> = layout.params().iter().map(|slot| zeros(slot.len)).collect();
            let full =
                group.gather_unit(Tag::default(), Arc::clone(&layout), shard, targets)?.wait()?;
            Ok(full)
        });
    }
}

#[test]
fn parts_are_summed_and_gathered_with_the_same_bits() {
    let divisor = |value| Divisor::new(value).expect("a divisor");
    for (wire, pre) in [(Wire::F32, 1.0), (Wire::BF16, 3.0), (Wire::F16, 2.0)] {
        same(|group| {
            let scaling = Scaling { wire, pre: divisor(pre), post: divisor(5.0) };
            let index = group.index();
            let ends = (0..group.size()).scan(0, |end, slot| {
                *end += 700 * (slot % 3) + slot;
                Some(*end)
            });
            let cuts: Arc<[usize]> = std::iter::once(0).chain(ends).collect();
            let len = cuts[group.size()];
            let part = cuts[index]..cuts[index + 1];
            let values = noise(index, len);
            let sums =
                group.reduce_scatter_scaled(Tag::default(), Arc::clone(&cuts), values, scaling)?;
            let sums = sums.wait()?[part.clone()].to_vec();
            let mut buffer = HostBuffer::zeros(wire.dtype(), len + index).expect("real");
            hsdp_kernels::cast(buffer.values_mut().slice(part), &sums);
            let gathered = group
                .gather_parts(Tag::default(), cuts, buffer)
                .and_then(hsdp_comm::PendingParts::wait)
                .map_err(|failed| failed.error)?;
            Ok((bytemuck::cast_slice::<f32, u32>(&sums).to_vec(), gathered))
        });
    }
}

#[test]
fn gradients_are_reduced_with_the_same_bits() {
    let scalings = [(Wire::F32, 1.0), (Wire::BF16, 3.0), (Wire::F16, 2.0), (Wire::F32, 7.0)];
    for ((wire, pre), fold) in
        scalings.into_iter().flat_map(|it| [(it, Fold::Replace), (it, Fold::Add)])
    {
        let divisor = |value| Divisor::new(value).expect("a divisor");
        let scaling = Scaling { wire, pre: divisor(pre), post: divisor(5.0) };
        same(|group| {
            let layout = layout(group.size());
            let gradient = |seed: usize, len| {
                let values = noise(group.index() + seed, len);
                let values: Arc<dyn GradientValues> = match seed {
                    0 => Arc::new(values),
                    _ => Arc::new(values.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
                };
                Some(values)
            };
            // The frozen one has none, and the third is absent on some.
            let absent = group.index() % 2 == 1;
            let third = if absent { None } else { gradient(1, 100) };
            let gradients = vec![gradient(0, 231), None, third, gradient(0, 2100)];
            let partial = noise(3, layout.trainable().shard_len);
            let contribution = Contribution { gradients, scaling };
            let accumulator = Accumulator { partial, fold };
            let reduced = group.reduce_unit(Tag::default(), layout, contribution, accumulator)?;
            let partial = reduced.wait()?.partial;
            let summed =
                group.all_reduce_scaled(Tag::default(), partial.clone(), scaling)?.wait()?;
            Ok([partial, summed].map(|values| bytemuck::cast_slice::<f32, u32>(&values).to_vec()))
        });
    }
}

#[test]
fn who_made_a_sum_infinite_is_the_same() {
    same(|group| {
        let layout = layout(group.size());
        let mut values = noise(group.index(), 2100);
        if group.index() == 1 {
            values[1234] = f32::INFINITY;
        }
        let gradients = vec![None, None, None, Some(Arc::new(values) as Arc<dyn GradientValues>)];
        let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
        let partial = vec![0.0; layout.trainable().shard_len];
        let accumulator = Accumulator { partial, fold: Fold::Replace };
        let reduced = group.reduce_unit(Tag::default(), layout, contribution, accumulator)?;
        Ok(reduced.wait()?.non_finite)
    });
}

#[test]
fn a_step_that_is_given_up_is_complete_for_all_or_for_none() {
    for _ in 0..30 {
        let ends = run(4, Between::Messages, |world| {
            let group = world.world_group(Channel::User);
            let first = group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32; 8]);
            if world.rank().index() == 2 {
                world.abort_step(StepFailure { step: 0, reason: "it gives up".to_owned() });
            }
            let first = first.and_then(hsdp_comm::Pending::wait).is_ok();
            let second = group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32; 8]);
            assert!(second.and_then(hsdp_comm::Pending::wait).is_err(), "rank 2 does not come");
            assert_eq!(world.next_epoch(), 1);
            let next = group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32; 8]);
            assert_eq!(next.and_then(hsdp_comm::Pending::wait), Ok(vec![4.0; 8]));
            first
        });
        assert!(ends.iter().all(|complete| *complete == ends[0]), "{ends:?}");
    }
}

#[test]
fn all_get_one_end_whoever_saw_one_first() {
    for _ in 0..20 {
        let ends = run(4, Between::Messages, |world| {
            if world.rank().index() > 1 {
                world.abort(&format!("rank {} wants it", world.rank()));
            }
            let group = world.world_group(Channel::User);
            group
                .barrier(Tag::default())
                .and_then(hsdp_comm::Pending::wait)
                .expect_err("it is over")
        });
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    }
}

#[test]
fn a_rank_that_leaves_keeps_what_it_has_promised() {
    let sums = run(3, Between::Messages, |world| {
        let group = world.world_group(Channel::User);
        let pending = group.all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32; 100_000])?;
        // It neither waits nor stays: its second round is sent all the same.
        if world.rank().index() == 0 { Ok(Vec::new()) } else { pending.wait() }
    });
    assert_eq!(sums[1..], [Ok(vec![3.0; 100_000]), Ok(vec![3.0; 100_000])]);
}

#[test]
fn a_rank_that_is_missing_is_named_by_the_deadline() {
    let options = WorldOptions {
        between: Between::Messages,
        deadline: Duration::from_secs(1),
        ..WorldOptions::default()
    };
    // The deadline does not include the start of the threads, which a busy machine delays.
    let started = Instant::now();
    let issued = Barrier::new(2);
    let ends = outcomes(3, options, |world| {
        let group = world.world_group(Channel::User);
        let is_missing = world.rank().index() == 1;
        while is_missing && world.end().is_none() {
            std::thread::yield_now();
        }
        let pending = group.barrier(Tag::default());
        if !is_missing {
            issued.wait();
        }
        pending.and_then(hsdp_comm::Pending::wait).expect_err("one is missing")
    });
    assert!(started.elapsed() < Duration::from_secs(5));
    for end in ends {
        let text = end.expect("no panic").to_string();
        assert!(
            text.starts_with("world aborted: rank 1, ") && text.contains("missing: ranks [1]"),
            "{text}"
        );
    }
}

#[test]
fn what_needs_shared_memory_is_refused_by_name() {
    let refused = run(2, Between::Messages, |world| {
        assert!(!world.shares_memory());
        let group = world.world_group(Channel::User);
        let layout = layout(2);
        let shard = Arc::new(vec![0.0_f32; layout.shard_len()]);
        let holder = None::<Arc<Holder>>;
        let gathered = group.gather_unit_shared(Tag::default(), layout, shard, holder);
        gathered.map(drop).map_err(|error| error.to_string())
    });
    assert_eq!(refused[1], Err("all_gather on rank 1: its members share no memory".to_owned()));
}

struct Holder(Vec<HostBuffer>);

impl AsMut<Vec<HostBuffer>> for Holder {
    fn as_mut(&mut self) -> &mut Vec<HostBuffer> {
        &mut self.0
    }
}

/// Rank 0 sends on the contributions of the others: it does so after it has left, and does not hide
/// that it has.
#[test]
fn a_rank_that_leaves_before_an_exchange_is_complete_says_so() {
    let began = Instant::now();
    let options = WorldOptions {
        between: Between::Messages,
        deadline: Duration::from_secs(20),
        ..WorldOptions::default()
    };
    let ends = outcomes(3, options, |world| {
        if world.rank().index() == 0 {
            let control = world.world_group(Channel::Control);
            return control.all_gather(Tag::default(), vec![1_u64]).map(drop);
        }
        world.world_group(Channel::User).barrier(Tag::default())?.wait()
    });
    for end in &ends[1..] {
        let error = end.as_ref().expect("no panic").as_ref().expect_err("rank 0 never comes");
        assert!(
            error.to_string().contains("rank 0") && error.to_string().contains("left"),
            "{error}"
        );
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn an_exchange_completes_though_rank_0_has_left() {
    let options = WorldOptions {
        between: Between::Messages,
        deadline: Duration::from_secs(20),
        ..WorldOptions::default()
    };
    let gathered = outcomes(3, options, |world| {
        let rank = world.rank().index();
        // Rank 0 contributes and goes; the others come later, apart from each other.
        thread::park_timeout(Duration::from_millis(200 * rank as u64));
        let control = world.world_group(Channel::Control);
        let pending = control.all_gather(Tag::default(), vec![rank as u64])?;
        if rank == 0 { Ok(Vec::new()) } else { pending.wait() }
    });
    let gathered: Vec<_> = gathered.into_iter().map(|it| it.expect("no panic")).collect();
    assert_eq!(gathered, [Ok(vec![]), Ok(vec![0, 1, 2]), Ok(vec![0, 1, 2])]);
}

/// The errors of two ranks that wait for each other, while a third computes.
fn circle_of_two(options: WorldOptions, third: impl Fn(World) + Sync, rank: usize) -> Vec<Error> {
    let ends = outcomes(3, options, |world| {
        if world.rank().index() == rank {
            third(world);
            return None;
        }
        let pair: Vec<_> = (0..3).filter(|it| *it != rank).map(hsdp_sharding::Rank::new).collect();
        let channel = [Channel::Reduce, Channel::Gather][usize::from(world.rank() == pair[0])];
        let group = world.group(&pair, channel).expect("a group");
        Some(group.barrier(Tag::default()).and_then(hsdp_comm::Pending::wait))
    });
    let ends = ends.into_iter().filter_map(|end| end.expect("no panic"));
    ends.map(|end| end.expect_err("none of them goes on")).collect()
}

/// The lowest rank that has not left compares the states of ranks, and decides how the world ends.
#[test]
fn ranks_that_wait_for_each_other_are_found_though_rank_0_has_left() {
    let options = WorldOptions { between: Between::Messages, ..WorldOptions::default() };
    let began = Instant::now();
    let ends = circle_of_two(options, drop, 0);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(ends[0], ends[1]);
    let Error::World(Mismatch(table)) = &ends[0] else { panic!("{}", ends[0]) };
    assert_eq!(table.rows.iter().map(|row| row.rank.index()).collect::<Vec<_>>(), [1, 2]);
}

/// A rank that computes is asked for its state, and answers. No rank has more than ten such
/// messages a second.
#[test]
fn few_messages_are_sent_while_ranks_wait_and_none_while_operations_complete() {
    let grace = Duration::from_millis(20);
    let options = |circle_grace| WorldOptions {
        between: Between::Messages,
        circle_grace,
        late: Duration::from_millis(100),
        ..WorldOptions::default()
    };
    let background = outcomes(3, options(grace), |world| {
        let began = Instant::now();
        if world.rank().index() == 1 {
            thread::park_timeout(Duration::from_secs(3));
        }
        world.world_group(Channel::User).barrier(Tag::default())?.wait()?;
        Ok::<_, Error>((world.messages().background, began.elapsed().as_secs()))
    });
    for (rank, messages) in background.into_iter().enumerate() {
        let (background, seconds) = messages.expect("no panic").expect("all have come");
        // Rank 0 asks the others.
        let most = if rank == 0 { 3 } else { 1 } * 10 * (seconds + 1);
        assert!((1..=most).contains(&background), "rank {rank}: {background} in {seconds} s");
    }
    let quiet =
        outcomes(3, WorldOptions { late: grace * 1000, ..options(grace * 1000) }, |world| {
            let group = world.world_group(Channel::User);
            for _ in 0..100 {
                group.all_reduce(Tag::default(), Reduction::Sum, vec![1_f32])?.wait()?;
            }
            Ok::<_, Error>(world.messages().background)
        });
    assert_eq!(quiet, [(); 3].map(|()| Ok(Ok(0))));
}
