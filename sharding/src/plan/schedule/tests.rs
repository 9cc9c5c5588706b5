use super::*;
use crate::{Param, Unit};

fn ids(units: &[usize]) -> Vec<UnitId> {
    units.iter().copied().map(UnitId::new).collect()
}

fn model() -> ModelSpec {
    ModelSpec::new()
        .unit(Unit::new("embedding").param(Param::new("wte", [4, 4])))
        .unit(Unit::new("block").param(Param::new("weight", [4])).keep())
        .unit(Unit::new("table").param(Param::new("sin", [4]).frozen()))
        .unit(Unit::new("head").param(Param::new("head", [4])))
}

#[test]
fn gathers_go_forward_and_come_back_without_what_was_kept() {
    let gathers = gathers(&model());
    let (forward, backward) = gathers.split_at(4);
    assert!(forward.iter().all(|gather| gather.phase == Phase::Forward));
    assert!(backward.iter().all(|gather| gather.phase == Phase::Backward));
    assert!(forward.iter().map(|gather| gather.unit).eq(ids(&[0, 1, 2, 3])));
    assert!(backward.iter().map(|gather| gather.unit).eq(ids(&[3, 2, 0])));
}

#[test]
fn reductions_come_back_without_what_is_frozen() {
    assert_eq!(reductions(&model()), ids(&[3, 1, 0]));
}
