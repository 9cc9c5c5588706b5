//! Buffers that do not fit the layout are refused before anything is issued.

use std::sync::Arc;

use hsdp_comm::{Accumulator, Channel, Contribution, LedgerSnapshot, Scaling, World, WorldOptions};
use hsdp_kernels::{Fold, HostBuffer, Wire};
use hsdp_sharding::{DType, ParamSlot, UnitLayout};

use super::{gradient, layout, shared, tag, unit};

#[test]
fn what_does_not_fit_the_layout_is_refused_with_numbers() {
    let world = &World::local(2, WorldOptions::default())[1];
    let group = world.world_group(Channel::Reduce);
    let part = layout(2).trainable().shard_len;
    let layout = layout(2);
    let refused = |layout: &Arc<UnitLayout>, gradients, partial| {
        let contribution = Contribution { gradients, scaling: Scaling::on(Wire::F32) };
        let layout = Arc::clone(layout);
        group
            .reduce_unit(tag(), layout, contribution, Accumulator { partial, fold: Fold::Replace })
            .expect_err("it is refused")
            .to_string()
    };
    let none = || vec![None, None, None, None, None];
    assert_eq!(
        refused(&layout, none(), vec![0.0; 3]),
        format!("reduce_scatter on rank 1: the partial has 3 elements, expected {part}")
    );
    assert_eq!(
        refused(&layout, vec![None], vec![0.0; part]),
        "reduce_scatter on rank 1: the list of gradients has 1 elements, expected 5"
    );
    let mut frozen = none();
    frozen[2] = Some(gradient(0, 2, 211));
    assert_eq!(
        refused(&layout, frozen, vec![0.0; part]),
        "reduce_scatter on rank 1: the gradient of `table` has 211 elements, expected none: it is frozen"
    );
    let other = Arc::new(UnitLayout::new(&unit(), 3).expect("a layout"));
    assert_eq!(
        refused(&other, none(), vec![0.0; part]),
        "reduce_scatter on rank 1: the layout has 3 shards, but the group has 2 members"
    );
}

#[test]
fn what_cannot_be_gathered_is_refused_with_numbers() {
    let world = &World::local(2, WorldOptions::default())[1];
    let group = world.world_group(Channel::Gather);
    let part = layout(2).shard_len();
    let layout = layout(2);
    let refused = |layout: &Arc<UnitLayout>, shard: usize, targets: Vec<HostBuffer>| {
        let layout = Arc::clone(layout);
        let shard = shared(DType::BF16, &vec![0.0; shard]);
        group.gather_unit(tag(), layout, shard, targets).expect_err("it is refused").to_string()
    };
    let targets = |change: fn(usize, &ParamSlot) -> (DType, usize)| -> Vec<HostBuffer> {
        let buffer = |(dtype, len)| HostBuffer::zeros(dtype, len).expect("real");
        layout.params().iter().enumerate().map(|(at, it)| buffer(change(at, it))).collect()
    };
    let fitting = || targets(|_, param| (DType::BF16, param.len));
    assert_eq!(
        refused(&layout, part - 1, fitting()),
        format!("all_gather on rank 1: the shard has {} elements, expected {part}", part - 1)
    );
    assert_eq!(
        refused(&layout, part, fitting().split_off(2)),
        "all_gather on rank 1: the list of targets has 3 elements, expected 5"
    );
    let short = targets(|at, param| (DType::BF16, param.len - usize::from(at == 2)));
    assert_eq!(
        refused(&layout, part, short),
        "all_gather on rank 1: the target of `table` has 210 elements, expected 211"
    );
    let mixed = targets(|at, param| (if at == 3 { DType::F16 } else { DType::BF16 }, param.len));
    assert_eq!(
        refused(&layout, part, mixed),
        "all_gather on rank 1: f16 elements: not the dtype of the shard"
    );
    let unconverted = targets(|_, param| (DType::F32, param.len));
    assert_eq!(
        refused(&layout, part, unconverted),
        "all_gather on rank 1: f32 elements: not the dtype of the shard"
    );
    let other = Arc::new(UnitLayout::new(&unit(), 3).expect("a layout"));
    assert_eq!(
        refused(&other, part, fitting()),
        "all_gather on rank 1: the layout has 3 shards, but the group has 2 members"
    );
    assert_eq!(world.ledger(), LedgerSnapshot::default(), "nothing was issued");
}
