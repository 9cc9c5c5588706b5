//! The order in which a model's collectives are issued: of the units as declared, or as the first forward used them. PROTOCOL.md,
//! "The order of units".

use std::sync::{Arc, OnceLock};

use hsdp_sharding::{Gather, Plan, UnitId};
use parking_lot::Mutex;

use crate::options::UnitOrder;

/// A plan in one order of its units, and the places of each unit's gathers.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) plan: Arc<Plan>,
    /// By unit: the positions of its gathers, for the forward and for the backward.
    turns: Vec<[Option<usize>; 2]>,
    /// By reduction: the number of gathers before it, where gathers and reductions are one sequence.
    gathers_before: Vec<usize>,
}

impl Schedule {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        let turns = turns(&plan);
        let gathers_before = plan.gathers_before_reductions();
        Self { plan, turns, gathers_before }
    }

    /// The number of gathers before a reduction of the microbatch, where they are one sequence; `None` behind the last reduction.
    pub(crate) fn gathers_before(&self, reduction: usize) -> Option<usize> {
        self.gathers_before.get(reduction).copied()
    }

    pub(crate) fn gathers(&self) -> &[Gather] {
        self.plan.gathers()
    }

    /// The positions of a unit's gathers: its turns in a microbatch.
    pub(crate) fn turns_of(&self, unit: UnitId) -> impl Iterator<Item = usize> {
        self.turns[unit.index()].into_iter().flatten()
    }
}

fn turns(plan: &Plan) -> Vec<[Option<usize>; 2]> {
    let mut turns = vec![[None; 2]; plan.spec().units().len()];
    for (index, gather) in plan.gathers().iter().enumerate() {
        turns[gather.unit.index()][gather.phase as usize] = Some(index);
    }
    turns
}

/// The schedule of a model: the declared one, until the ranks have agreed on another.
#[derive(Debug)]
pub(crate) struct Schedules {
    declared: Arc<Schedule>,
    /// The schedule on which the ranks have agreed in the step that is under way.
    found: Mutex<Option<Arc<Schedule>>>,
    /// The schedule of all steps after the first one that was finished.
    settled: OnceLock<Arc<Schedule>>,
}

impl Schedules {
    pub(crate) fn new(plan: Arc<Plan>, order: UnitOrder) -> Self {
        let is_settled = order == UnitOrder::Error || plan.order().len() == 1;
        let declared = Arc::new(Schedule::new(plan));
        let settled = OnceLock::new();
        if is_settled {
            settled.get_or_init(|| Arc::clone(&declared));
        }
        Self { declared, found: Mutex::default(), settled }
    }

    /// The schedule of the next operation.
    pub(crate) fn current(&self) -> Arc<Schedule> {
        if let Some(settled) = self.settled.get() {
            return Arc::clone(settled);
        }
        Arc::clone(self.found.lock().as_ref().unwrap_or(&self.declared))
    }

    /// The plan in the order that is settled; as declared before that.
    pub(crate) fn plan(&self) -> &Plan {
        &self.settled.get().unwrap_or(&self.declared).plan
    }

    /// Whether the next forward finds the order.
    pub(crate) fn is_open(&self) -> bool {
        self.settled.get().is_none() && self.found.lock().is_none()
    }

    /// Makes the schedule of an order that is not the model's.
    pub(crate) fn of(&self, order: &[UnitId]) -> Arc<Schedule> {
        if order == self.declared.plan.order() {
            return Arc::clone(&self.declared);
        }
        Arc::new(Schedule::new(Arc::new(self.declared.plan.in_order(order))))
    }

    /// Notes the schedule on which the ranks have agreed in a step.
    pub(crate) fn find(&self, schedule: &Arc<Schedule>) {
        *self.found.lock() = Some(Arc::clone(schedule));
    }

    /// The schedule in the declared order.
    pub(crate) fn declared(&self) -> &Arc<Schedule> {
        &self.declared
    }

    /// Keeps the schedule of a step that all ranks have finished.
    pub(crate) fn settle(&self) {
        if let Some(found) = self.found.lock().take() {
            self.settled.get_or_init(|| found);
        }
    }

    /// Forgets the schedule of a step that was aborted: another rank may not have found it.
    pub(crate) fn forget(&self) {
        *self.found.lock() = None;
    }

    /// A digest of the order for the step header; 0 until it is settled.
    pub(crate) fn digest(&self) -> u64 {
        self.settled.get().map_or(0, |settled| settled.plan.order_digest())
    }
}
