//! The first forward: as declared at first, and from the first unit that is not, the ranks agree on
//! each unit before they gather it. PROTOCOL.md of the runtime, "The order of units".

use std::mem;
use std::sync::Arc;

use super::gathers::{Gathers, Purpose, Sequence, Slot};
use super::order::{Order, Orders};
use super::{Exchange, NextUnit, Output, UnitUse};
use crate::UnitId;

/// An order that is being found.
#[derive(Debug)]
pub(super) struct Finding {
    /// Units so far.
    pub(super) found: Vec<UnitId>,
    /// Whether they are the first of the declared order, as far as this rank knows. Otherwise all
    /// ranks have agreed on them.
    is_declared: bool,
    /// Record of the rank from the end of its forward until the order is found.
    end: Option<UnitUse>,
    stage: Stage,
}

/// How far an agreement on the next unit is.
#[derive(Debug)]
enum Stage {
    /// No agreement is under way.
    Open,
    /// Before the first exchange: the other gathers of the forward, in the declared order. Other
    /// ranks may wait in them, and come to the exchange after them.
    Gathering { says: UnitUse, place: usize },
    /// The exchange.
    Asking { says: UnitUse, place: usize },
    /// After the exchange: units that were gathered beyond `place` are dropped, to be gathered
    /// again.
    Returning { place: usize, next: NextUnit },
}

impl Default for Finding {
    fn default() -> Self {
        Self { found: Vec::new(), is_declared: true, end: None, stage: Stage::Open }
    }
}

impl Gathers {
    /// Returns the units of a forward that finds the order, so far.
    pub(super) fn found(&self) -> &[UnitId] {
        match &self.sequence {
            Sequence::Known(_) => &[],
            Sequence::Finding(finding) => &finding.found,
        }
    }

    /// Where the order of the units is being found: takes `unit` as the next one, or begins to
    /// agree on it with the other ranks, if it is not the next one as declared.
    pub(super) fn find(&mut self, orders: &Orders, unit: UnitId) {
        let Sequence::Finding(finding) = &mut self.sequence else { return };
        if finding.found.contains(&unit) {
            self.end_finding();
        } else if finding.is_declared && declared(orders)[finding.found.len()] == unit {
            self.add(unit);
        } else {
            self.agree(UnitUse::Needs(unit));
        }
    }

    /// Where the order of the units is being found: ends the forward of this rank. A rank that has
    /// used no unit gathers along with the others.
    pub(super) fn end_finding(&mut self) {
        if let Sequence::Finding(finding) = &mut self.sequence {
            let ends = if finding.found.is_empty() { UnitUse::Follows } else { UnitUse::Ends };
            finding.end.get_or_insert(ends);
        }
    }

    /// Returns the next output of the agreement that is under way. `None`: the next unit is known,
    /// or if this rank has ended its forward, the order is.
    pub(super) fn find_next(&mut self, orders: &mut Orders) -> Option<Output> {
        loop {
            let Sequence::Finding(finding) = &mut self.sequence else { return None };
            match (&finding.stage, finding.end) {
                (Stage::Open, None) => return None,
                (Stage::Open, Some(end)) => {
                    // A unit on which the others have agreed.
                    if let Some(output) = self.gather_along(orders) {
                        return Some(output);
                    }
                    self.agree(end);
                }
                (&Stage::Gathering { says, place }, _) => {
                    if let Some(output) = self.gather_as_declared(orders, place) {
                        return Some(output);
                    }
                    self.set(Stage::Asking { says, place });
                }
                (&Stage::Asking { says, place }, _) => {
                    return Some(Output::Exchange(Exchange::Unit { says, place }));
                }
                (&Stage::Returning { place, .. }, _) => {
                    let beyond = place..self.slots.len();
                    if let Some(output) = beyond.into_iter().find_map(|at| self.free_next(at)) {
                        return Some(output);
                    }
                    self.conclude(orders);
                }
            }
        }
    }

    /// Takes the conclusion of all ranks.
    pub(super) fn take_next_unit(&mut self, place: usize, next: NextUnit) {
        // If the declared order stays to its end, nothing was gathered that is not used.
        let place = match next {
            NextUnit::Gather(_) | NextUnit::Differ(_) => place,
            NextUnit::Over | NextUnit::Nothing => self.slots.len(),
        };
        self.set(Stage::Returning { place, next });
    }

    fn agree(&mut self, says: UnitUse) {
        let place = self.slots.len();
        if let Sequence::Finding(finding) = &mut self.sequence {
            finding.stage = match finding.is_declared {
                true => Stage::Gathering { says, place },
                false => Stage::Asking { says, place },
            };
        }
    }

    fn gather_along(&mut self, orders: &Orders) -> Option<Output> {
        let (last, spec) = (self.slots.len().checked_sub(1)?, orders.declared().plan.spec());
        self.issue_next(last + 1).or_else(|| self.free_unless_kept(last, spec))
    }

    fn gather_as_declared(&mut self, orders: &Orders, place: usize) -> Option<Output> {
        let (spec, units) = (orders.declared().plan.spec(), declared(orders));
        for (at, unit) in units.iter().enumerate().skip(place) {
            if self.slots.len() == at {
                self.add(*unit);
            }
            if let Some(output) = self.issue_next(at + 1) {
                return Some(output);
            }
            if let Some(output) = self.free_unless_kept(at, spec) {
                return Some(output);
            }
        }
        None
    }

    /// Goes on by the conclusion of all ranks, when all that was gathered beyond is dropped.
    fn conclude(&mut self, orders: &mut Orders) {
        let Sequence::Finding(finding) = &mut self.sequence else { return };
        let stage = mem::replace(&mut finding.stage, Stage::Open);
        let Stage::Returning { place, next } = stage else { return };
        self.slots.truncate(place);
        self.issued = self.issued.min(place);
        finding.found.truncate(place);
        match next {
            NextUnit::Gather(unit) => {
                finding.is_declared = false;
                self.add(unit);
            }
            NextUnit::Over => {
                let order = self.follow_found(orders);
                self.keep(orders, order);
            }
            NextUnit::Nothing => drop(self.follow_found(orders)),
            NextUnit::Differ(_) => {
                self.follow_found(orders);
                let order = Arc::clone(orders.declared());
                self.keep(orders, order);
            }
        }
    }

    /// Goes on with the units that were not used so far, in the declared order.
    fn follow_found(&mut self, orders: &Orders) -> Arc<Order> {
        let order = orders.beginning_with(self.found());
        self.follow(Arc::clone(&order));
        order
    }

    /// Keeps an order: for the model, or for the rest of the evaluation.
    fn keep(&mut self, orders: &mut Orders, order: Arc<Order>) {
        match &mut self.purpose {
            Purpose::Training => orders.find(order),
            Purpose::Evaluation(kept) => *kept = Some(order),
        }
    }

    fn add(&mut self, unit: UnitId) {
        if let Sequence::Finding(finding) = &mut self.sequence {
            finding.found.push(unit);
            self.slots.push(Slot::Waiting);
        }
    }

    fn set(&mut self, stage: Stage) {
        if let Sequence::Finding(finding) = &mut self.sequence {
            finding.stage = stage;
        }
    }
}

fn declared(orders: &Orders) -> &[UnitId] {
    orders.declared().plan.order()
}
