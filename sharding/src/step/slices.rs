//! The gathers of updated slices over the replicas. They are issued after a step, and may be under
//! way in the next one.

use std::mem;

use super::output::{Operation, Output};
use super::rules::Rules;
use crate::UnitId;

/// State of the gather of a unit's slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlicesState {
    /// The shard is whole.
    Whole,
    /// To be issued again: it was lost with a step that was aborted.
    Lost,
    /// Under way.
    Issued,
}

/// The gathers of a model's slices.
#[derive(Debug)]
pub(super) struct SliceGathers {
    /// State by unit.
    states: Vec<SlicesState>,
    /// Units whose gathers another rank may not have completed, in the order of issue: those that
    /// were issued since the last step that all ranks have finished.
    unconfirmed: Vec<UnitId>,
    /// Whether a unit is one of these.
    is_unconfirmed: Vec<bool>,
    /// Number of units whose gathers were lost.
    lost: usize,
}

impl SliceGathers {
    /// Makes the state of a model of this many units, whose shards are whole.
    pub(super) fn new(units: usize) -> Self {
        Self {
            states: vec![SlicesState::Whole; units],
            unconfirmed: Vec::new(),
            is_unconfirmed: vec![false; units],
            lost: 0,
        }
    }

    /// Returns whether the shard of a unit is not whole.
    pub(super) fn is_under_way(&self, unit: UnitId) -> bool {
        self.states[unit.index()] != SlicesState::Whole
    }

    /// Issues the gather of a unit.
    pub(super) fn issue(&mut self, unit: UnitId) -> Output {
        self.set(unit, SlicesState::Issued);
        if !mem::replace(&mut self.is_unconfirmed[unit.index()], true) {
            self.unconfirmed.push(unit);
        }
        Output::GatherSlices(unit)
    }

    /// Returns the wait for the gather of a unit, if it is under way.
    pub(super) fn wait(&self, unit: UnitId, rules: &Rules) -> Option<Output> {
        let operation = Operation::GatherSlices(unit);
        let wait = if rules.is_one_sequence() { Output::Follow } else { Output::Await };
        self.is_under_way(unit).then(|| wait(operation))
    }

    /// Returns the wait for the next gather of all that are under way.
    pub(super) fn wait_for_any(&self, rules: &Rules) -> Option<Output> {
        self.unconfirmed.iter().find_map(|unit| self.wait(*unit, rules))
    }

    /// Issues the next gather that was lost.
    pub(super) fn issue_lost(&mut self) -> Option<Output> {
        if self.lost == 0 {
            return None;
        }
        let is_lost = |unit: &&UnitId| self.states[unit.index()] == SlicesState::Lost;
        let unit = *self.unconfirmed.iter().find(is_lost)?;
        Some(self.issue(unit))
    }

    /// Notes that the gather of a unit is complete.
    pub(super) fn complete(&mut self, unit: UnitId) {
        self.set(unit, SlicesState::Whole);
    }

    /// Sets the state of a unit to one that is not lost.
    fn set(&mut self, unit: UnitId, state: SlicesState) {
        let before = mem::replace(&mut self.states[unit.index()], state);
        self.lost -= usize::from(before == SlicesState::Lost);
    }

    /// Notes that all ranks have finished a step, in which they gathered each unit.
    pub(super) fn confirm(&mut self) {
        for unit in self.unconfirmed.drain(..) {
            self.is_unconfirmed[unit.index()] = false;
        }
    }

    /// Notes that a step was aborted on all ranks. Some of them may have completed gathers that
    /// others have lost, so each rank issues all of them again.
    pub(super) fn lose(&mut self) {
        for unit in &self.unconfirmed {
            self.states[unit.index()] = SlicesState::Lost;
        }
        self.lost = self.unconfirmed.len();
    }
}
