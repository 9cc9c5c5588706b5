//! Gradients are lent by code of users, which may panic, hang, or call back.

use std::ops::Range;
use std::sync::Arc;

use hsdp_comm::{Accumulator, Contribution, Error, Group, Pending, Reduced, Scaling, Tag};
use hsdp_kernels::{Fold, GradientValues, Values, Wire};
use hsdp_sharding::{Param, Unit, UnitLayout};

mod calling_back;
mod hanging;
mod panicking;

/// Elements of a gradient whose reduction workers do.
const LARGE: usize = 1_000_000;

fn tag() -> Tag {
    Tag::default()
}

fn layout(size: usize, len: usize) -> Arc<UnitLayout> {
    let unit = Unit::new("unit").param(Param::new("weight", [len]));
    Arc::new(UnitLayout::new(&unit, size).expect("a layout"))
}

fn reduce(
    group: &Group,
    layout: &Arc<UnitLayout>,
    gradient: Arc<dyn GradientValues>,
) -> Result<Pending<Reduced>, Error> {
    let contribution =
        Contribution { gradients: vec![Some(gradient)], scaling: Scaling::on(Wire::F32) };
    let partial = vec![0.0; layout.trainable().shard_len];
    let accumulator = Accumulator { partial, fold: Fold::Replace };
    group.reduce_unit(tag(), Arc::clone(layout), contribution, accumulator)
}

/// A gradient that does something when it is read.
struct Reading<F>(usize, F);

impl<F> std::fmt::Debug for Reading<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reading")
    }
}

impl<F: Fn() + Send + Sync> GradientValues for Reading<F> {
    fn len(&self) -> usize {
        self.0
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        (self.1)();
        visit(Values::F32(&vec![1.0; range.len()]));
    }
}
