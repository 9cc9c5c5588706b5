//! Where an infinity or a NaN in a partial came from: the first parameter, and the first member.

use std::ops::Range;
use std::sync::Arc;

use hsdp_comm::{Accumulator, Channel, Contribution, NonFiniteAt, Scaling, World};
use hsdp_kernels::{Divisor, Fold, GradientValues, Values, Wire};
use hsdp_sharding::{Param, Rank, Unit, UnitLayout};

use super::{end_of_reduction, layout, tag};
use crate::common::results;

const MEMBERS: usize = 3;
const ELEMENTS: usize = 40_000;

/// The gradient of each member for parameter `b`, of which element `at` is special.
fn reduced(scaling: Scaling, at: usize, special: [f32; MEMBERS]) -> Vec<Option<NonFiniteAt>> {
    reduced_onto(0.0, scaling, at, special)
}

fn reduced_onto(
    before: f32,
    scaling: Scaling,
    at: usize,
    special: [f32; MEMBERS],
) -> Vec<Option<NonFiniteAt>> {
    let unit = Unit::new("unit").param(Param::new("a", [100])).param(Param::new("b", [ELEMENTS]));
    let layout = Arc::new(UnitLayout::new(&unit, MEMBERS).expect("a layout"));
    results(MEMBERS, |world: World| {
        let group = world.world_group(Channel::Reduce);
        let mut b = vec![1.0_f32; ELEMENTS];
        b[at] = special[world.rank().index()];
        // A later element of the same kind is not the first.
        b[ELEMENTS - 1] = special[world.rank().index()];
        let gradients = vec![None, Some(Arc::new(b) as Arc<dyn GradientValues>)];
        let contribution = Contribution { gradients, scaling };
        let partial = vec![before; layout.trainable().shard_len];
        let accumulator = Accumulator { partial, fold: Fold::Add };
        let pending = group.reduce_unit(tag(), Arc::clone(&layout), contribution, accumulator);
        pending.and_then(|pending| pending.wait()).expect("reduced").non_finite
    })
}

fn from(rank: usize) -> Option<NonFiniteAt> {
    Some(NonFiniteAt { param: 1, from: Some(Rank::new(rank)) })
}

#[test]
fn a_nan_names_its_member() {
    let f32 = Scaling::on(Wire::F32);
    // The last element lies in the last shard.
    assert_eq!(reduced(f32, 0, [1.0, f32::NAN, 1.0]), [from(1), None, from(1)]);
    assert_eq!(reduced(f32, 20_000, [1.0, 1.0, f32::INFINITY]), [None, from(2), from(2)]);
    assert_eq!(reduced(f32, 0, [1.0, f32::INFINITY, f32::NAN]), [from(1), None, from(1)]);
}

#[test]
fn what_overflows_on_the_wire_is_its_members_doing() {
    let f16 = Scaling::on(Wire::F16);
    assert_eq!(reduced(f16, 0, [1.0, 1.0, 70_000.0]), [from(2), None, from(2)]);
    let two = Divisor::new(2.0).expect("a divisor");
    assert_eq!(reduced(Scaling { pre: two, ..f16 }, 0, [1.0, 1.0, 70_000.0]), [None; 3]);
}

#[test]
fn a_sum_that_overflows_is_nobodys_doing() {
    let sum = Some(NonFiniteAt { param: 1, from: None });
    let f32 = Scaling::on(Wire::F32);
    assert_eq!(reduced(f32, 0, [f32::MAX, f32::MAX, 0.0]), [sum, None, sum]);
    assert_eq!(reduced_onto(f32::MAX, f32, 0, [f32::MAX, 0.0, 0.0]), [sum, None, sum]);
}

/// A gradient that lends no single element, against the contract.
#[derive(Debug)]
struct NoSingle(Vec<f32>);

impl GradientValues for NoSingle {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn read(&self, range: Range<usize>, visit: &mut dyn FnMut(Values<'_>)) {
        if range.len() > 1 {
            visit(Values::F32(&self.0[range]));
        }
    }
}

/// The element that is not finite is read once more, alone: without it nobody would be named.
#[test]
fn a_gradient_that_does_not_lend_the_element_that_is_not_finite_ends_the_world() {
    let ends = results(2, |world| {
        let mut gradients = vec![None, None, None, None, None];
        if world.rank().index() == 1 {
            let values = vec![f32::NAN; 37 * 19];
            gradients[0] = Some(Arc::new(NoSingle(values)) as Arc<dyn GradientValues>);
        }
        end_of_reduction(&world, layout(2), gradients)
    });
    for end in ends {
        assert!(end.starts_with("world aborted: rank 1, step 0"), "{end}");
        assert!(end.ends_with("the gradient of parameter 0 was lent 0 times, not once"), "{end}");
    }
}
