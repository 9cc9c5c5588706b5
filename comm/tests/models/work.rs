//! Code of users in blocks: it panics, it calls back, it owns what it should not.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Weak};

use hsdp_comm::CallError::Reentrant;
use hsdp_comm::{Accumulator, Contribution, Error, Group, Pending, Reduced, Scaling, Tag, World};
use hsdp_kernels::{Fold, GradientValues, Values, Wire};
use hsdp_sharding::{Param, Unit, UnitLayout};
use shuttle::thread;

use super::{options, run, run_alone, schedules, settled, user};

/// Elements of a gradient that two members reduce in one block each, and leave to workers.
const LENT: usize = 16_000;

/// Of one parameter, shared by two.
pub(crate) fn layout(len: usize) -> Arc<UnitLayout> {
    let unit = Unit::new("unit").param(Param::new("weight", [len]));
    Arc::new(UnitLayout::new(&unit, 2).expect("a layout"))
}

/// A gradient of ones that does something when it is read.
struct Reading<F> {
    len: usize,
    act: F,
}

impl<F> std::fmt::Debug for Reading<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reading")
    }
}

impl<F: Fn() + Send + Sync> GradientValues for Reading<F> {
    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        (self.act)();
        visit(Values::F32(&vec![1.0; range.len()]));
    }
}

/// The operation that a member has issued, and the gradient that it has lent for it.
pub(crate) type Issued = (Result<Pending<Reduced>, Error>, Weak<dyn GradientValues>);

/// Reduces a gradient of `len` ones that does something when it is read.
pub(crate) fn reduce(group: &Group, len: usize, act: impl Fn() + Send + Sync + 'static) -> Issued {
    let gradient: Arc<dyn GradientValues> = Arc::new(Reading { len, act });
    let lent = Arc::downgrade(&gradient);
    let layout = layout(len);
    let contribution =
        Contribution { gradients: vec![Some(gradient)], scaling: Scaling::on(Wire::F32) };
    let partial = vec![0.0; layout.trainable().shard_len];
    let accumulator = Accumulator { partial, fold: Fold::Replace };
    (group.reduce_unit(Tag::default(), layout, contribution, accumulator), lent)
}

/// A gradient of rank 1 panics in a world with `workers`.
fn panics(workers: usize) {
    let worlds = World::local(2, options(workers));
    let ended = run(&worlds, |world| {
        let is_bad = world.rank().index() == 1;
        // The hook of panics would take this one for a model that failed.
        let read = move || {
            if is_bad {
                resume_unwind(Box::new("the tensor is gone"));
            }
        };
        let (pending, lent) = reduce(&user(&world), LENT, read);
        let end = settled(pending).expect_err("rank 1 panics");
        (end.to_string(), lent)
    });
    drop(worlds);
    for (end, lent) in ended {
        assert!(end.starts_with("world aborted: rank 1, "), "{end}");
        assert!(end.ends_with("it panicked: the tensor is gone"), "{end}");
        assert!(lent.upgrade().is_none(), "what was lent is dropped, and the workers are joined");
    }
}

#[test]
fn a_panic_in_a_member_that_does_the_work() {
    schedules(|| panics(0));
}

#[test]
fn a_panic_in_a_worker_or_a_member_that_helps() {
    schedules(|| panics(1));
}

#[test]
fn a_panic_while_two_workers_run_blocks() {
    schedules(|| panics(2));
}

#[test]
fn code_that_is_called_from_a_block_cannot_issue() {
    schedules(|| {
        let worlds = World::local(2, options(1));
        let sums = run(&worlds, |world| {
            let group = user(&world);
            let inner = group.clone();
            let read = move || {
                let refused = inner.barrier(Tag::default()).expect_err("it is in a block");
                assert!(matches!(refused, Error::Call(Reentrant { .. })), "{refused}");
            };
            settled(reduce(&group, LENT, read).0).expect("reduced").partial[0]
        });
        assert_eq!(sums, [2.0, 2.0]);
    });
}

#[test]
fn a_worker_that_drops_the_last_handle_of_its_world() {
    schedules(|| {
        let worlds = World::local(2, options(2));
        let gradients = run_alone(worlds, |world| {
            let group = user(&world);
            let (pending, lent) = reduce(&group.clone(), LENT, move || assert_eq!(group.size(), 2));
            drop((world, pending.expect("issued")));
            lent
        });
        // The workers end by themselves: one of them may be the last to have a handle.
        while gradients.iter().any(|lent| lent.strong_count() > 0) {
            thread::yield_now();
        }
    });
}
