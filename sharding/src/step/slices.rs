//! The gathers of updated slices over the replicas. They are issued after a step, and may be under
//! way in the next one.

use std::collections::VecDeque;

use super::output::{Operation, Output};
use super::rules::Rules;
use crate::UnitId;

/// The gathers of a model's slices.
#[derive(Debug)]
pub(super) struct SliceGathers {
    /// Whether a gather is under way, by unit.
    under_way: Vec<bool>,
    /// Units whose slices all ranks gather once more, in the order of issue.
    again: VecDeque<UnitId>,
}

impl SliceGathers {
    /// Makes the state of a model of this many units, whose shards are whole.
    pub(super) fn new(units: usize) -> Self {
        Self { under_way: vec![false; units], again: VecDeque::new() }
    }

    /// Returns whether the gather of a unit is under way.
    pub(super) fn is_under_way(&self, unit: UnitId) -> bool {
        self.under_way[unit.index()]
    }

    /// Issues the gather of a unit.
    pub(super) fn issue(&mut self, unit: UnitId) -> Output {
        self.under_way[unit.index()] = true;
        Output::GatherSlices(unit)
    }

    /// Has units gathered once more.
    pub(super) fn gather_again(&mut self, units: impl Iterator<Item = UnitId>) {
        self.again = units.collect();
    }

    /// Issues the next gather that all ranks make once more.
    pub(super) fn issue_again(&mut self) -> Option<Output> {
        let unit = self.again.pop_front()?;
        Some(self.issue(unit))
    }

    /// Returns the wait for the gather of a unit, if it is under way.
    pub(super) fn wait(&self, unit: UnitId, rules: &Rules) -> Option<Output> {
        let operation = Operation::GatherSlices(unit);
        let wait = if rules.is_one_sequence() { Output::Follow } else { Output::Await };
        self.is_under_way(unit).then(|| wait(operation))
    }

    /// Returns the wait for one of the gathers that are under way.
    pub(super) fn wait_for_any(&self, rules: &Rules) -> Option<Output> {
        let unit = self.under_way.iter().position(|is_under_way| *is_under_way)?;
        self.wait(UnitId::new(unit), rules)
    }

    /// Notes that the gather of a unit is complete.
    pub(super) fn complete(&mut self, unit: UnitId) {
        self.under_way[unit.index()] = false;
    }

    /// Notes that a step or an evaluation was aborted. The host knows whether gathers are lost.
    pub(super) fn abort(&mut self) {
        self.again.clear();
    }
}
