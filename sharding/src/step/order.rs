//! The order of the units: as declared, or as the first forward has used them; and the rules.

use std::sync::Arc;

use super::output::Output;
use super::rules::{Rules, UnitOrder};
use super::slices::SliceGathers;
use crate::{Plan, UnitId};

/// A plan in one order of its units, and the places of each unit's gathers.
#[derive(Debug)]
pub(super) struct PlanOrder {
    pub(super) plan: Arc<Plan>,
    /// By unit: the places of its gathers, for the forward and for the backward.
    places: Vec<[Option<usize>; 2]>,
    /// Number of gathers before each reduction, where gathers and reductions are one sequence.
    gathers_before: Vec<usize>,
}

impl PlanOrder {
    fn new(plan: Arc<Plan>) -> Self {
        let mut places = vec![[None; 2]; plan.spec().units().len()];
        for (place, gather) in plan.gathers().iter().enumerate() {
            places[gather.unit.index()][gather.phase as usize] = Some(place);
        }
        let gathers_before = plan.gathers_before_reductions();
        Self { plan, places, gathers_before }
    }

    /// Returns the number of gathers before a reduction of the microbatch, where they are one
    /// sequence; `None` behind the last reduction.
    pub(super) fn gathers_before(&self, reduction: usize) -> Option<usize> {
        self.gathers_before.get(reduction).copied()
    }

    /// Returns the places of a unit's gathers in a microbatch.
    pub(super) fn places_of(&self, unit: UnitId) -> impl Iterator<Item = usize> + use<> {
        self.places[unit.index()].into_iter().flatten()
    }
}

/// The order of a model's units: the declared one, until the ranks have agreed on another. Beside
/// it the rules of the order of its steps, and the gathers that outlast them.
#[derive(Debug)]
pub(super) struct PlanOrders {
    /// Rules of the order of a step.
    pub(super) rules: Rules,
    /// The gathers of updated slices.
    pub(super) slices: SliceGathers,
    declared: Arc<PlanOrder>,
    /// The order on which the ranks have agreed in the step that is under way.
    found: Option<Arc<PlanOrder>>,
    /// The order of all steps after the first one that was finished.
    settled: Option<Arc<PlanOrder>>,
}

impl PlanOrders {
    pub(super) fn new(plan: Arc<Plan>, rules: Rules) -> Self {
        let is_settled = rules.order == UnitOrder::Error || plan.order().len() == 1;
        let slices = SliceGathers::new(plan.layouts().len());
        let declared = Arc::new(PlanOrder::new(plan));
        let settled = is_settled.then(|| Arc::clone(&declared));
        Self { rules, slices, declared, found: None, settled }
    }

    /// Has the slices of all units gathered once more.
    pub(super) fn gather_again(&mut self) {
        let plan = Arc::clone(&self.current().plan);
        plan.update_order().for_each(|unit| self.slices.make_due(unit));
    }

    /// Issues the first gather of slices that is due, in the order of updates.
    pub(super) fn slices_due_next(&self) -> Option<Output> {
        if !self.slices.has_due() {
            return None;
        }
        let mut order = self.current().plan.update_order();
        order.find(|unit| self.slices.is_due(*unit)).map(Output::GatherSlices)
    }

    /// Issues the gathers of slices that are due, and waits for all of them.
    pub(super) fn whole_shards_next(&self) -> Option<Output> {
        self.slices_due_next().or_else(|| self.slices.wait_for_any(&self.rules))
    }

    /// Returns the order of the next operation.
    pub(super) fn current(&self) -> &Arc<PlanOrder> {
        self.known().unwrap_or(&self.declared)
    }

    pub(super) fn is_settled(&self) -> bool {
        self.settled.is_some()
    }

    /// Returns the order, unless the next forward finds it.
    pub(super) fn known(&self) -> Option<&Arc<PlanOrder>> {
        self.settled.as_ref().or(self.found.as_ref())
    }

    pub(super) fn declared(&self) -> &Arc<PlanOrder> {
        &self.declared
    }

    /// Makes the order of these units, followed by all others as they are declared.
    pub(super) fn beginning_with(&self, units: &[UnitId]) -> Arc<PlanOrder> {
        let mut is_used = vec![false; self.declared.plan.order().len()];
        units.iter().for_each(|unit| is_used[unit.index()] = true);
        let rest = self.declared.plan.order().iter().filter(|unit| !is_used[unit.index()]);
        let order: Vec<UnitId> = units.iter().chain(rest).copied().collect();
        if order == self.declared.plan.order() {
            return Arc::clone(&self.declared);
        }
        Arc::new(PlanOrder::new(Arc::new(self.declared.plan.in_order(&order))))
    }

    /// Keeps the order on which the ranks have agreed, for the rest of the step.
    pub(super) fn find(&mut self, order: Arc<PlanOrder>) {
        self.found = Some(order);
    }

    /// Keeps the order of a step that all ranks have finished.
    pub(super) fn settle(&mut self) {
        if let Some(found) = self.found.take() {
            self.settled.get_or_insert(found);
        }
    }

    /// Forgets the order of a step that was aborted.
    pub(super) fn forget(&mut self) {
        self.found = None;
    }
}
