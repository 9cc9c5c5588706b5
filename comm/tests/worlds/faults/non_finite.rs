//! A gradient that is not finite, on one rank.

use std::sync::Arc;

use half::{bf16, f16};
use hsdp_comm::{
    Accumulator, Channel, Contribution, Error, Fault, FaultKind, NonFiniteAt, Reduced, Scaling,
    Stage, World,
};
use hsdp_kernels::{Fold, GradientValues, Wire};
use hsdp_sharding::{Param, Unit, UnitId, UnitLayout};

use super::{CULPRIT, options, promptly, settled, tag};

/// A gradient for each parameter of `unit` that has one: all elements are 1.
type Gradients = fn() -> Vec<Option<Arc<dyn GradientValues>>>;

fn ones<T: From<u8> + Copy>(len: usize) -> Vec<T> {
    vec![T::from(1); len]
}

fn layout() -> Arc<UnitLayout> {
    let params = [("bias", 40), ("weight", 20_000), ("scale", 3)];
    let unit = params
        .into_iter()
        .fold(Unit::new("unit"), |unit, (name, len)| unit.param(Param::new(name, [len])));
    Arc::new(UnitLayout::new(&unit, 3).expect("a layout"))
}

fn reduce_unit(world: &World, unit: usize, gradients: Gradients) -> Result<Reduced, Error> {
    let layout = layout();
    let partial = vec![0.0; layout.trainable().shard_len];
    let contribution = Contribution { gradients: gradients(), scaling: Scaling::on(Wire::F32) };
    let accumulator = Accumulator { partial, fold: Fold::Replace };
    let group = world.world_group(Channel::Reduce);
    settled(group.reduce_unit(tag(Stage::Reduce, unit), layout, contribution, accumulator))
}

/// The elements of the partials of all ranks that are not 3 or padding, and what is said of them.
fn reduced_with(value: f32, gradients: Gradients) -> (Vec<f32>, Vec<NonFiniteAt>) {
    let fault = Fault::at(CULPRIT, 0, UnitId::new(1), FaultKind::NonFinite(value));
    let outcomes = promptly(options([fault]), move |world| {
        let before = reduce_unit(&world, 0, gradients)?;
        let reduced = reduce_unit(&world, 1, gradients)?;
        let after = reduce_unit(&world, 1, gradients)?;
        assert_eq!(before, after, "only once, and in unit 1 only");
        assert_eq!((before.non_finite, world.armed_faults()), (None, vec![]));
        Ok::<_, Error>(reduced)
    });
    let mut odd = Vec::new();
    let mut said = Vec::new();
    for reduced in outcomes {
        let Reduced { partial, non_finite, .. } = reduced.expect("no panic").expect("reduced");
        odd.extend(partial.into_iter().filter(|sum| ![0.0, 3.0].contains(sum)));
        said.extend(non_finite);
    }
    (odd, said)
}

#[test]
fn non_finite() {
    let all: Gradients = || {
        [40, 20_000, 3]
            .map(|len| Some(Arc::new(ones::<f32>(len)) as Arc<dyn GradientValues>))
            .into()
    };
    let (odd, said) = reduced_with(f32::NAN, all);
    assert!(odd.len() == 1 && odd[0].is_nan(), "{odd:?}");
    assert_eq!(said, [NonFiniteAt { param: 0, from: Some(CULPRIT) }]);
    let (odd, said) = reduced_with(f32::NEG_INFINITY, all);
    assert_eq!(odd, [f32::NEG_INFINITY]);
    assert_eq!(said, [NonFiniteAt { param: 0, from: Some(CULPRIT) }]);
}

#[test]
fn of_the_first_gradient_that_there_is_in_its_own_dtype() {
    let second: Gradients = || {
        let weight = Arc::new(vec![bf16::ONE; 20_000]) as Arc<dyn GradientValues>;
        vec![None, Some(weight), None]
    };
    let (odd, said) = reduced_with(f32::INFINITY, second);
    assert_eq!(odd, [f32::INFINITY]);
    assert_eq!(said, [NonFiniteAt { param: 1, from: Some(CULPRIT) }]);
    let last: Gradients = || {
        let scale = Arc::new(vec![f16::ONE; 3]) as Arc<dyn GradientValues>;
        vec![None, None, Some(scale)]
    };
    // Finite in f32, but not in f16.
    let (odd, said) = reduced_with(1e6, last);
    assert_eq!(odd, [f32::INFINITY]);
    assert_eq!(said, [NonFiniteAt { param: 2, from: Some(CULPRIT) }]);
}

#[test]
fn it_waits_for_a_call_that_brings_a_gradient() {
    let fault = Fault::at(CULPRIT, 0, Stage::Reduce, FaultKind::NonFinite(f32::NAN));
    let outcomes = promptly(options([fault]), |world| {
        let none: Gradients = || vec![None, None, None];
        let first = reduce_unit(&world, 0, none)?;
        let armed = world.armed_faults().len();
        let one: Gradients = || vec![Some(Arc::new(ones::<f32>(40))), None, None];
        let second = reduce_unit(&world, 0, one)?;
        Ok::<_, Error>((first.non_finite, armed, second.non_finite.is_some(), world.rank()))
    });
    for outcome in outcomes {
        let (first, armed, found, rank) = outcome.expect("no panic").expect("reduced");
        assert_eq!((first, armed), (None, usize::from(rank == CULPRIT)));
        assert_eq!(found, rank.index() == 0, "rank 0 owns the element");
    }
}

/// Calls that bring no gradient come first: the value waits for one that does.
#[test]
fn a_value_at_a_call_without_a_gradient_waits_for_the_first_one_that_brings_one() {
    let ones: Gradients = || {
        [40, 20_000, 3]
            .map(|len| Some(Arc::new(ones::<f32>(len)) as Arc<dyn GradientValues>))
            .into()
    };
    let fault = Fault::at(CULPRIT, 0, 1, FaultKind::NonFinite(f32::NAN));
    let outcomes = promptly(options([fault]), move |world| {
        let before = reduce_unit(&world, 0, ones)?;
        for _ in 0..2 {
            settled(world.world_group(Channel::User).barrier(tag(Stage::User, 0)))?;
        }
        let armed = world.armed_faults().len();
        let reduced = reduce_unit(&world, 0, ones)?;
        Ok::<_, Error>((
            world.rank(),
            before.non_finite,
            armed,
            reduced.non_finite,
            world.armed_faults(),
        ))
    });
    for outcome in outcomes {
        let (rank, before, armed, found, left) = outcome.expect("no panic").expect("reduced");
        assert_eq!((before, armed, left), (None, usize::from(rank == CULPRIT), vec![]));
        // The first parameter lies in the shard of rank 0.
        let first = NonFiniteAt { param: 0, from: Some(CULPRIT) };
        assert_eq!(found, (rank.index() == 0).then_some(first));
    }
}
