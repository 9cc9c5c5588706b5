//! The gathers of one microbatch, or of one batch of an evaluation: issued in the order of the
//! units, whatever the order in which the program needs them.
//!
//! The first forward finds that order: as declared at first, and from the first unit that is not,
//! the ranks agree on each unit before they gather it. PROTOCOL.md of the runtime, "The order of
//! units".

use std::sync::Arc;

use super::exchange::{Exchange, NextUnit, UnitUse};
use super::inputs::Refused;
use super::order::{PlanOrder, PlanOrders};
use super::output::{Operation, Output};
use super::rules::{EvaluationKind, UnitOrder};
use super::statistics::{StatisticsCursor, StatisticsQueue, reversed_in_backward};
use crate::{AfterForward, Gather, ModelSpec, Phase, UnitId};

/// State of the gather at one place in the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GatherState {
    /// Not issued. Gathers before an issued one are never in this state.
    Waiting,
    /// Under way, as far as the machine knows.
    Issued,
    /// Complete, and neither handed out nor dropped.
    Arrived,
    /// Handed out, or dropped.
    Taken,
}

/// Purpose of the gathers.
#[derive(Debug)]
enum GatherPurpose {
    /// A microbatch. The first forward finds the order of the model.
    Training,
    /// A batch of an evaluation. If the order of the model is open, the first forward of the
    /// evaluation finds an order for the others, which is `found`.
    Evaluation { kind: EvaluationKind, found: Option<Arc<PlanOrder>> },
}

impl GatherPurpose {
    /// Returns whether units are gathered for a backward.
    fn has_backward(&self) -> bool {
        match self {
            Self::Training => true,
            Self::Evaluation { kind, .. } => *kind == EvaluationKind::WithBackward,
        }
    }
}

/// An order that is being found. There is no gather ahead.
#[derive(Debug)]
struct StepFinding {
    /// Units so far.
    units: Vec<UnitId>,
    /// Whether they are the first of the declared order, as far as this rank knows. Otherwise all
    /// ranks have agreed on them.
    is_declared: bool,
    /// Record of the rank from the end of its forward until the order is found.
    end: Option<UnitUse>,
    stage: FindingStage,
}

/// How far an agreement on the next unit is.
#[derive(Clone, Copy, Debug)]
enum FindingStage {
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

impl Default for StepFinding {
    fn default() -> Self {
        Self { units: Vec::new(), is_declared: true, end: None, stage: FindingStage::Open }
    }
}

/// The gathers of one microbatch, or of one batch.
#[derive(Debug)]
pub(super) struct GatherQueue {
    purpose: GatherPurpose,
    /// Order of the gathers; `None` while this forward finds it.
    order: Option<Arc<PlanOrder>>,
    finding: StepFinding,
    states: Vec<GatherState>,
    statistics: StatisticsQueue,
    /// Number of gathers that were issued: all before that index, and none from it on.
    pub(super) issued: usize,
    /// Number of first gathers that are to be issued, as soon as the slices of their units are
    /// whole.
    wanted: usize,
    /// Place of the last gather for the forward that was taken.
    last_in_forward: Option<usize>,
    /// Number of first gathers that the end of the forward has dropped, or keeps.
    forward_ended: usize,
    /// Number of first gathers that are all taken, as far as the end of the microbatch has seen.
    ended: usize,
}

impl GatherQueue {
    /// Makes the queue of a step.
    pub(super) fn of_step() -> Self {
        Self::new(GatherPurpose::Training)
    }

    /// Makes the queue of an evaluation.
    pub(super) fn of_evaluation(kind: EvaluationKind) -> Self {
        Self::new(GatherPurpose::Evaluation { kind, found: None })
    }

    fn new(purpose: GatherPurpose) -> Self {
        Self {
            purpose,
            order: None,
            finding: StepFinding::default(),
            states: Vec::new(),
            statistics: StatisticsQueue::default(),
            issued: 0,
            wanted: 0,
            last_in_forward: None,
            forward_ended: 0,
            ended: 0,
        }
    }

    /// Begins a microbatch, when the one before is over.
    pub(super) fn begin(&mut self, orders: &PlanOrders) {
        self.states.clear();
        self.statistics.begin();
        self.last_in_forward = None;
        self.issued = 0;
        self.wanted = 0;
        self.forward_ended = 0;
        self.ended = 0;
        let kept = match &self.purpose {
            GatherPurpose::Training => None,
            GatherPurpose::Evaluation { found, .. } => found.as_ref(),
        };
        match orders.known().or(kept).map(Arc::clone) {
            Some(order) => self.follow(order),
            None => {
                self.order = None;
                self.finding = StepFinding::default();
            }
        }
    }

    /// Goes on by an order that the gathers so far begin.
    fn follow(&mut self, order: Arc<PlanOrder>) {
        let gathers = match self.purpose.has_backward() {
            true => order.plan.gathers().len(),
            false => order.plan.order().len(),
        };
        self.states.resize(gathers, GatherState::Waiting);
        self.finding.units.clear();
        self.order = Some(order);
    }

    /// Returns the gather at a place.
    fn gather(&self, place: usize) -> Gather {
        match &self.order {
            Some(order) => order.plan.gathers()[place],
            None => Gather { unit: self.found()[place], phase: Phase::Forward },
        }
    }

    /// Returns the place of the next gather of `unit`, if there is one.
    pub(super) fn place_of(&self, unit: UnitId) -> Option<usize> {
        let is_open =
            |place: &usize| self.states.get(*place).is_some_and(|it| *it != GatherState::Taken);
        match &self.order {
            Some(order) => order.places_of(unit).find(is_open),
            None => self.found().iter().position(|found| *found == unit).filter(is_open),
        }
    }

    /// Checks that `unit` may be needed now. Where the order is being found, a second use of a unit
    /// belongs to the backward.
    pub(super) fn check(
        &self,
        orders: &PlanOrders,
        unit: UnitId,
        microbatch: usize,
    ) -> Result<(), Refused> {
        let is_left = if self.order.is_some() {
            self.place_of(unit).is_some()
        } else if self.found().contains(&unit) {
            orders.declared().plan.spec()[unit].after_forward == AfterForward::Reshard
                && self.purpose.has_backward()
        } else {
            true
        };
        if !is_left {
            return Err(Refused::NoGatherLeft { unit, microbatch });
        }
        let last = self.last_in_forward.filter(|_| orders.rules.order == UnitOrder::Error);
        match last {
            Some(last) if self.place_of(unit).is_some_and(|place| place < last) => {
                Err(Refused::OutOfOrder { unit, after: self.gather(last).unit })
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the next gather of `unit` belongs to the backward.
    pub(super) fn next_is_backward(&self, unit: UnitId) -> bool {
        match &self.order {
            Some(_) => self.place_of(unit).is_some_and(|place| self.is_backward(place)),
            None => self.found().contains(&unit),
        }
    }

    /// Returns whether the gather at a place belongs to the backward.
    pub(super) fn is_backward(&self, place: usize) -> bool {
        self.gather(place).phase == Phase::Backward
    }

    /// Returns the number of gathers that are issued, at least, when the one at a place is handed
    /// out.
    pub(super) fn end_of_prefetch(&self, place: usize, prefetch: usize) -> usize {
        self.states.len().min(place.saturating_add(prefetch).saturating_add(1))
    }

    /// Issues the next gather, if fewer than `end` were issued, behind the gather of its unit's
    /// slices.
    pub(super) fn issue_next(&mut self, orders: &PlanOrders, end: usize) -> Option<Output> {
        let place = self.issued;
        if place >= end.min(self.states.len()) {
            return None;
        }
        let before = orders.slices.before_gather(self.gather(place).unit, &orders.rules);
        if before.is_some() {
            return before;
        }
        self.states[place] = GatherState::Issued;
        self.issued += 1;
        let Gather { unit, phase } = self.gather(place);
        Some(Output::Gather { place, unit, phase })
    }

    /// Hands out the gather at a place, behind the issue of the first `end`, except those behind it
    /// whose slices are not whole.
    pub(super) fn take_next(
        &mut self,
        orders: &PlanOrders,
        place: usize,
        end: usize,
    ) -> Option<Output> {
        self.wanted = self.wanted.max(end);
        let output = self.issue_next(orders, place + 1).or_else(|| self.prefetch_next(orders));
        output.or_else(|| {
            self.end_next(place, |Gather { unit, phase }| Output::Hand { place, unit, phase })
        })
    }

    /// Issues the next gather that is wanted, if the slices of its unit are whole. In one sequence
    /// the order of operations keeps it behind them.
    pub(super) fn prefetch_next(&mut self, orders: &PlanOrders) -> Option<Output> {
        match self.watching(orders) {
            Some(_) if !orders.rules.is_one_sequence() => None,
            _ => self.issue_next(orders, self.wanted),
        }
    }

    /// Returns the gather of slices whose completion lets the next gather be issued ahead.
    pub(super) fn watching(&self, orders: &PlanOrders) -> Option<Operation> {
        let is_wanted = self.issued < self.wanted.min(self.states.len());
        let unit = is_wanted.then(|| self.gather(self.issued).unit)?;
        orders.slices.is_under_way(unit).then_some(Operation::GatherSlices(unit))
    }

    /// Waits for the gather at a place, and drops it, if it was issued and not handed out.
    fn free_next(&mut self, place: usize) -> Option<Output> {
        self.end_next(place, |Gather { unit, phase }| Output::Free { place, unit, phase })
    }

    /// Waits for the gather at a place, and ends it by the output that `end` returns.
    fn end_next(&mut self, place: usize, end: impl Fn(Gather) -> Output) -> Option<Output> {
        let gather = self.gather(place);
        let Gather { unit, phase } = gather;
        match self.states[place] {
            GatherState::Issued => Some(Output::Await(Operation::Gather { place, unit, phase })),
            GatherState::Arrived => {
                self.states[place] = GatherState::Taken;
                if phase == Phase::Forward {
                    self.last_in_forward = self.last_in_forward.max(Some(place));
                }
                Some(end(gather))
            }
            GatherState::Waiting | GatherState::Taken => None,
        }
    }

    /// Ends the forward, whose order is known: issues its remaining gathers, whether this rank uses
    /// them or not, since other ranks may wait for them, and drops units that the backward gathers
    /// again.
    pub(super) fn end_forward_next(&mut self, orders: &PlanOrders) -> Option<Output> {
        let spec = orders.declared().plan.spec();
        let units = spec.units().len();
        if let Some(issue) = self.issue_next(orders, units) {
            return Some(issue);
        }
        for place in self.forward_ended..units {
            let output = self.free_unless_kept(place, spec);
            let output = output.or_else(|| self.pass_statistics(orders, Phase::Forward, place + 1));
            if output.is_some() {
                return output;
            }
            self.forward_ended = place + 1;
        }
        None
    }

    /// Drops the gather at a place as [`free_next`](Self::free_next) does, unless the unit is kept.
    fn free_unless_kept(&mut self, place: usize, spec: &ModelSpec) -> Option<Output> {
        match spec[self.gather(place).unit].after_forward {
            AfterForward::Keep => None,
            AfterForward::Reshard | AfterForward::Discard => self.free_next(place),
        }
    }

    /// Issues and drops the first `count` gathers, one after the other, except those that were
    /// handed out: other ranks may wait for them, and a peer may still read this rank's shard.
    ///
    /// The statistics of the units before each of them are issued first, since other ranks may wait
    /// in these.
    pub(super) fn finish_next(&mut self, orders: &PlanOrders, count: usize) -> Option<Output> {
        for place in self.ended..count.min(self.states.len()) {
            if let Some(output) = self.statistics_before_next(orders, place) {
                return Some(output);
            }
            if self.states[place] == GatherState::Taken {
                self.ended = place + 1;
                continue;
            }
            if let Some(output) = self.issue_next(orders, place + 1) {
                return Some(output);
            }
            if let Some(output) = self.free_next(place) {
                return Some(output);
            }
        }
        None
    }

    /// Issues the statistics that come before the gather at a place in a program that uses each
    /// unit in turn.
    pub(super) fn statistics_before_next(
        &mut self,
        orders: &PlanOrders,
        place: usize,
    ) -> Option<Output> {
        let Gather { unit, phase } = self.gather(place);
        if phase == Phase::Forward {
            return self.pass_statistics(orders, phase, place);
        }
        let output = self.pass_statistics(orders, Phase::Forward, usize::MAX);
        output.or_else(|| {
            let behind = self.place_in(unit, Phase::Backward)?;
            self.pass_statistics(orders, Phase::Backward, behind)
        })
    }

    /// Issues the statistics that are left at the end of a microbatch, and waits for all that this
    /// rank has issued with zeros.
    pub(super) fn end_statistics_next(&mut self, orders: &PlanOrders) -> Option<Output> {
        let output = self.pass_statistics(orders, Phase::Forward, usize::MAX);
        let output = output.or_else(|| self.pass_statistics(orders, Phase::Backward, usize::MAX));
        output.or_else(|| self.statistics.await_next())
    }

    /// Issues the next statistics of a phase with zeros, if they belong to one of the first `end`
    /// units in the order of the phase.
    fn pass_statistics(&mut self, orders: &PlanOrders, phase: Phase, end: usize) -> Option<Output> {
        self.pass_statistics_before(orders, phase, StatisticsCursor { place: end, index: 0 })
    }

    fn pass_statistics_before(
        &mut self,
        orders: &PlanOrders,
        phase: Phase,
        end: StatisticsCursor,
    ) -> Option<Output> {
        if matches!(self.purpose, GatherPurpose::Evaluation { .. }) {
            return None;
        }
        let order = self.order.as_ref().map(|order| order.plan.order());
        let order = order.unwrap_or(&self.finding.units);
        let over = StatisticsCursor { place: order.len(), index: 0 };
        let unit = |place: usize| match phase {
            Phase::Forward => order[place],
            Phase::Backward => order[order.len() - 1 - place],
        };
        self.statistics.pass_next(orders.declared().plan.spec(), phase, end.min(over), unit)
    }

    /// Returns the place of a unit in the order of a phase; `None` if that is not known.
    fn place_in(&self, unit: UnitId, phase: Phase) -> Option<usize> {
        let Some(order) = &self.order else {
            let is_known = phase == Phase::Forward;
            return self.found().iter().position(|found| *found == unit).filter(|_| is_known);
        };
        let forward = order.places_of(unit).next()?;
        Some(match phase {
            Phase::Forward => forward,
            Phase::Backward => order.plan.order().len() - 1 - forward,
        })
    }

    /// Checks that the program may give these statistics now.
    pub(super) fn check_statistics(
        &self,
        orders: &PlanOrders,
        unit: UnitId,
        index: usize,
        phase: Phase,
        microbatch: usize,
    ) -> Result<(), Refused> {
        let declared = &orders.declared().plan.spec()[unit];
        let count = declared.statistics.len();
        if index >= count {
            return Err(Refused::NoSuchStatistics { unit, index, count });
        }
        let is_gathered_again =
            phase == Phase::Backward && declared.after_forward == AfterForward::Reshard;
        let gather = match &self.order {
            Some(order) => order.places_of(unit).nth(usize::from(is_gathered_again)),
            None => self.place_in(unit, Phase::Forward).filter(|_| !is_gathered_again),
        };
        if gather.is_none_or(|place| self.states[place] != GatherState::Taken) {
            return Err(Refused::StatisticsBeforeUnit { unit, index });
        }
        let Some(place) = self.place_in(unit, phase) else { return Ok(()) };
        let at = StatisticsCursor { place, index: reversed_in_backward(phase, index, count) };
        match at < self.statistics.cursor(phase) {
            true => Err(Refused::StatisticsPassed { unit, index, microbatch }),
            false => Ok(()),
        }
    }

    /// Returns the number of gathers before the statistics of a unit in the backward of a program
    /// that uses each unit in turn.
    pub(super) fn end_before_statistics(&self, unit: UnitId) -> usize {
        let own = self.place_in(unit, Phase::Backward);
        let is_behind = |place: &usize| {
            let Gather { unit, phase } = self.gather(*place);
            phase == Phase::Backward && self.place_in(unit, Phase::Backward) > own
        };
        (self.issued..self.states.len()).find(is_behind).unwrap_or(self.states.len())
    }

    /// Issues the program's statistics, behind all that come before them, and waits for their sums.
    pub(super) fn statistics_next(
        &mut self,
        orders: &PlanOrders,
        unit: UnitId,
        index: usize,
        phase: Phase,
    ) -> Option<Output> {
        let count = orders.declared().plan.spec()[unit].statistics.len();
        let place = self.place_in(unit, phase)?;
        let at = StatisticsCursor { place, index: reversed_in_backward(phase, index, count) };
        if !self.statistics.has_own() {
            let output = match phase {
                Phase::Forward => None,
                Phase::Backward => self.pass_statistics(orders, Phase::Forward, usize::MAX),
            };
            let output = output.or_else(|| self.pass_statistics_before(orders, phase, at));
            if output.is_some() {
                return output;
            }
        }
        self.statistics.own_next(at, unit, index, phase)
    }

    /// Notes that an operation is complete.
    pub(super) fn complete(&mut self, operation: Operation) {
        self.statistics.complete(operation);
        if let Operation::Gather { place, .. } = operation
            && self.states.get(place) == Some(&GatherState::Issued)
        {
            self.states[place] = GatherState::Arrived;
        }
    }

    /// Returns the units of a forward that finds the order, so far.
    pub(super) fn found(&self) -> &[UnitId] {
        &self.finding.units
    }

    /// Where the order of the units is being found: takes `unit` as the next one, or begins to
    /// agree on it with the other ranks, if it is not the next one as declared.
    pub(super) fn find(&mut self, orders: &PlanOrders, unit: UnitId) {
        let found = self.found();
        if self.order.is_some() {
            return;
        }
        if found.contains(&unit) {
            self.end_finding();
        } else if self.finding.is_declared && declared(orders)[found.len()] == unit {
            self.add(unit);
        } else {
            self.agree(UnitUse::Needs(unit));
        }
    }

    /// Where the order of the units is being found: ends the forward of this rank. A rank that has
    /// used no unit gathers along with the others.
    pub(super) fn end_finding(&mut self) {
        let ends = if self.found().is_empty() { UnitUse::Follows } else { UnitUse::Ends };
        self.finding.end.get_or_insert(ends);
    }

    /// Returns the next output of the agreement that is under way. `None`: the next unit is known,
    /// or if this rank has ended its forward, the order is.
    pub(super) fn find_next(&mut self, orders: &mut PlanOrders) -> Option<Output> {
        while self.order.is_none() {
            match self.finding.stage {
                FindingStage::Open => {
                    let end = self.finding.end?;
                    // A unit on which the others have agreed.
                    if let Some(output) = self.gather_along(orders) {
                        return Some(output);
                    }
                    self.agree(end);
                }
                FindingStage::Gathering { says, place } => {
                    if let Some(output) = self.gather_as_declared(orders, place) {
                        return Some(output);
                    }
                    self.finding.stage = FindingStage::Asking { says, place };
                }
                FindingStage::Asking { says, place } => {
                    // The program is done with the units so far.
                    let output = self.pass_statistics(orders, Phase::Forward, usize::MAX);
                    if output.is_some() {
                        return output;
                    }
                    return Some(Output::Exchange(Exchange::Unit { says, place }));
                }
                FindingStage::Returning { place, next } => {
                    if let Some(output) = self.statistics.await_next() {
                        return Some(output);
                    }
                    let mut beyond = place..self.states.len();
                    if let Some(output) = beyond.find_map(|at| self.free_next(at)) {
                        return Some(output);
                    }
                    self.resume(orders, place, next);
                }
            }
        }
        None
    }

    /// Takes the conclusion of all ranks.
    pub(super) fn take_next_unit(&mut self, place: usize, next: NextUnit) {
        // If the declared order stays to its end, nothing was gathered that is not used.
        let place = match next {
            NextUnit::Gather(_) | NextUnit::Differ(_) => place,
            NextUnit::Over | NextUnit::Nothing => self.states.len(),
        };
        self.finding.stage = FindingStage::Returning { place, next };
    }

    fn agree(&mut self, says: UnitUse) {
        let place = self.states.len();
        self.finding.stage = match self.finding.is_declared {
            true => FindingStage::Gathering { says, place },
            false => FindingStage::Asking { says, place },
        };
    }

    fn gather_along(&mut self, orders: &PlanOrders) -> Option<Output> {
        let last = self.states.len().checked_sub(1)?;
        let spec = orders.declared().plan.spec();
        let output = self.pass_statistics(orders, Phase::Forward, last);
        let output = output.or_else(|| self.issue_next(orders, last + 1));
        output.or_else(|| self.free_unless_kept(last, spec))
    }

    fn gather_as_declared(&mut self, orders: &PlanOrders, place: usize) -> Option<Output> {
        let spec = orders.declared().plan.spec();
        for (at, unit) in declared(orders).iter().enumerate().skip(place) {
            if self.states.len() == at {
                self.add(*unit);
            }
            let output = self.pass_statistics(orders, Phase::Forward, at);
            let output = output.or_else(|| self.issue_next(orders, at + 1));
            let output = output.or_else(|| self.free_unless_kept(at, spec));
            if output.is_some() {
                return output;
            }
        }
        None
    }

    /// Goes on by the conclusion of all ranks, when all that was gathered beyond is dropped.
    fn resume(&mut self, orders: &mut PlanOrders, place: usize, next: NextUnit) {
        self.finding.stage = FindingStage::Open;
        self.finding.units.truncate(place);
        self.states.truncate(place);
        self.issued = self.issued.min(place);
        self.statistics.truncate(place);
        if let NextUnit::Gather(unit) = next {
            self.finding.is_declared = false;
            self.add(unit);
            return;
        }
        // The units that were not used so far follow in the declared order.
        let order = orders.beginning_with(self.found());
        self.follow(Arc::clone(&order));
        match next {
            NextUnit::Gather(_) | NextUnit::Nothing => {}
            NextUnit::Over => self.keep(orders, order),
            NextUnit::Differ(_) => self.keep(orders, Arc::clone(orders.declared())),
        }
    }

    /// Keeps an order: for the model, or for the rest of the evaluation.
    fn keep(&mut self, orders: &mut PlanOrders, order: Arc<PlanOrder>) {
        match &mut self.purpose {
            GatherPurpose::Training => orders.find(order),
            GatherPurpose::Evaluation { found, .. } => *found = Some(order),
        }
    }

    fn add(&mut self, unit: UnitId) {
        self.finding.units.push(unit);
        self.states.push(GatherState::Waiting);
    }
}

fn declared(orders: &PlanOrders) -> &[UnitId] {
    orders.declared().plan.order()
}
