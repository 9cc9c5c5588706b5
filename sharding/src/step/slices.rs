//! The gathers of updated slices over the replicas. They may be under way in the step that follows
//! the update.

use std::mem;

use super::output::{Operation, Output};
use super::rules::Rules;
use crate::UnitId;

/// The gathers of a model's slices.
#[derive(Debug)]
pub(super) struct SliceGathers {
    /// The state of each unit.
    units: Vec<UnitSlices>,
    /// Number of gathers that are to be issued. Each output of a step asks whether there are any.
    due: usize,
    /// Number of gathers that are under way.
    under_way: usize,
}

/// How far the gather of a unit's slices is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnitSlices {
    /// The shard is whole, as far as the machine knows.
    Whole,
    /// The gather is to be issued: next, or in one sequence before the unit's next gather.
    Due,
    /// The gather is under way.
    UnderWay,
}

impl SliceGathers {
    /// Makes the state of a model of this many units, whose shards are whole.
    pub(super) fn new(units: usize) -> Self {
        Self { units: vec![UnitSlices::Whole; units], due: 0, under_way: 0 }
    }

    /// Returns whether the gather of a unit is to be issued.
    pub(super) fn is_due(&self, unit: UnitId) -> bool {
        self.units[unit.index()] == UnitSlices::Due
    }

    /// Returns whether the gather of a unit is under way.
    pub(super) fn is_under_way(&self, unit: UnitId) -> bool {
        self.units[unit.index()] == UnitSlices::UnderWay
    }

    /// Returns whether gathers are to be issued.
    pub(super) fn has_due(&self) -> bool {
        self.due > 0
    }

    /// Has a unit gathered.
    pub(super) fn make_due(&mut self, unit: UnitId) {
        self.put(unit, UnitSlices::Due);
    }

    /// Notes that the gather of a unit was issued.
    pub(super) fn issued(&mut self, unit: UnitId) {
        self.put(unit, UnitSlices::UnderWay);
    }

    /// Notes that the gather of a unit is complete.
    pub(super) fn complete(&mut self, unit: UnitId) {
        self.put(unit, UnitSlices::Whole);
    }

    /// Puts a unit into another state.
    fn put(&mut self, unit: UnitId, state: UnitSlices) {
        match mem::replace(&mut self.units[unit.index()], state) {
            UnitSlices::Whole => {}
            UnitSlices::Due => self.due -= 1,
            UnitSlices::UnderWay => self.under_way -= 1,
        }
        match state {
            UnitSlices::Whole => {}
            UnitSlices::Due => self.due += 1,
            UnitSlices::UnderWay => self.under_way += 1,
        }
    }

    /// Returns what comes before a gather of a unit: the gather of its slices, or the wait for it.
    pub(super) fn before_gather(&self, unit: UnitId, rules: &Rules) -> Option<Output> {
        match self.units[unit.index()] {
            UnitSlices::Whole => None,
            UnitSlices::Due => Some(Output::GatherSlices(unit)),
            UnitSlices::UnderWay => Some(wait(unit, rules)),
        }
    }

    /// Returns the wait for one of the gathers that are under way.
    pub(super) fn wait_for_any(&self, rules: &Rules) -> Option<Output> {
        if self.under_way == 0 {
            return None;
        }
        let unit = self.units.iter().position(|state| *state == UnitSlices::UnderWay)?;
        Some(wait(UnitId::new(unit), rules))
    }

    /// Forgets gathers that are due, since a step or an evaluation was aborted. The host knows that
    /// they are lost.
    pub(super) fn abort(&mut self) {
        if self.has_due() {
            let due = self.units.iter_mut().filter(|state| **state == UnitSlices::Due);
            due.for_each(|state| *state = UnitSlices::Whole);
            self.due = 0;
        }
    }
}

fn wait(unit: UnitId, rules: &Rules) -> Output {
    let operation = Operation::GatherSlices(unit);
    if rules.is_one_sequence() { Output::Follow(operation) } else { Output::Await(operation) }
}
