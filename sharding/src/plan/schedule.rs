//! The order in which one microbatch issues its collectives.

use crate::{AfterForward, ModelSpec, Phase, UnitId};

/// One all-gather of a unit's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gather {
    /// The unit that is gathered.
    pub unit: UnitId,
    /// The half of the microbatch that needs the unit.
    pub phase: Phase,
}

/// The order of a microbatch's collectives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    /// All units, in the order of the forward.
    pub(super) order: Vec<UnitId>,
    pub(super) gathers: Vec<Gather>,
    pub(super) reductions: Vec<UnitId>,
}

impl Schedule {
    /// The schedule of a forward that uses all units in this order.
    pub(super) fn of(spec: &ModelSpec, order: Vec<UnitId>) -> Self {
        let resharded = |unit: &UnitId| spec[*unit].after_forward == AfterForward::Reshard;
        let forward = order.iter().map(|&unit| Gather { unit, phase: Phase::Forward });
        let backward = order.iter().copied().rev();
        let again = backward.clone().filter(resharded);
        let again = again.map(|unit| Gather { unit, phase: Phase::Backward });
        let gathers = forward.chain(again).collect();
        let reductions = backward.filter(|unit| spec[*unit].is_trainable()).collect();
        Self { order, gathers, reductions }
    }

    /// Returns the number of gathers before each reduction, where gathers and reductions are one
    /// sequence.
    pub(super) fn gathers_before(&self, spec: &ModelSpec, prefetch: usize) -> Vec<usize> {
        let all = self.gathers.len();
        let mut places = vec![None; spec.units().len()];
        for (place, gather) in self.gathers.iter().enumerate().skip(self.order.len()) {
            places[gather.unit.index()] = Some(place);
        }
        let mut last = self.order.len() - 1;
        let before = |unit: &UnitId| {
            last = places[unit.index()].unwrap_or(last);
            let end = last.saturating_add(prefetch).saturating_add(1).min(all);
            spec[*unit].is_trainable().then_some(end)
        };
        self.order.iter().rev().filter_map(before).collect()
    }
}

#[cfg(test)]
mod tests {
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

    fn schedule(order: &[usize]) -> Schedule {
        Schedule::of(&model(), ids(order))
    }

    fn gathered(schedule: &Schedule, phase: Phase) -> Vec<UnitId> {
        let of_phase = schedule.gathers.iter().filter(|gather| gather.phase == phase);
        of_phase.map(|gather| gather.unit).collect()
    }

    #[test]
    fn gathers_go_forward_and_come_back_without_what_was_kept() {
        let schedule = schedule(&[0, 1, 2, 3]);
        assert_eq!(gathered(&schedule, Phase::Forward), ids(&[0, 1, 2, 3]));
        assert_eq!(gathered(&schedule, Phase::Backward), ids(&[3, 2, 0]));
        assert!(schedule.gathers[..4].iter().all(|gather| gather.phase == Phase::Forward));
    }

    #[test]
    fn reductions_come_back_without_what_is_frozen() {
        assert_eq!(schedule(&[0, 1, 2, 3]).reductions, ids(&[3, 1, 0]));
    }

    #[test]
    fn another_order_comes_back_in_reverse() {
        let schedule = schedule(&[3, 0, 1, 2]);
        assert_eq!(gathered(&schedule, Phase::Forward), ids(&[3, 0, 1, 2]));
        assert_eq!(gathered(&schedule, Phase::Backward), ids(&[2, 0, 3]));
        assert_eq!(schedule.reductions, ids(&[1, 0, 3]));
    }

    #[test]
    fn units_for_the_forward_alone_do_not_come_back() {
        let table = Unit::new("table").param(Param::new("sin", [4]).frozen()).forward_only();
        let spec = ModelSpec::new().unit(table).unit(Unit::new("head").param(Param::new("w", [4])));
        let schedule = Schedule::of(&spec, ids(&[0, 1]));
        assert_eq!(gathered(&schedule, Phase::Forward), ids(&[0, 1]));
        assert_eq!(gathered(&schedule, Phase::Backward), ids(&[1]));
    }

    #[test]
    fn a_reduction_follows_the_gathers_of_all_units_behind_it() {
        // Gathers: 0 1 2 3, then 3 2 0. The second is kept, the third is frozen.
        let before = |prefetch| schedule(&[0, 1, 2, 3]).gathers_before(&model(), prefetch);
        assert_eq!(before(0), [5, 6, 7]);
        assert_eq!(before(1), [6, 7, 7]);
        assert_eq!(before(usize::MAX), [7, 7, 7]);
    }
}
