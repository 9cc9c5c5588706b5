//! The program of a rank in a step, and what the machine of the step answers, written down as
//! blocks.

use std::sync::Arc;

use hsdp_flight::{Channel, Op, Stage};
use hsdp_sharding::step::{
    Begin, Call, Conclusion, Exchange, Headers, Input, Intent, Kind, Operation, Output, Refused,
    Rules, Sequences, StepMachine, Supply, Target, Uneven, UnitOrder,
};
use hsdp_sharding::{AfterForward, Phase, Plan, UnitId};

use super::{Action, Microbatches, ModelPlacement, Reference, StepBlock, StepOperation, Work};

/// The program of a rank in a step.
pub(super) struct Script {
    plan: Arc<Plan>,
    placement: ModelPlacement,
    machine: StepMachine,
    blocks: Vec<StepBlock>,
    block: StepBlock,
    /// Indices in the block of the microbatch's gathers, by place.
    gathers: Vec<usize>,
    /// Last reduce-scatter of each unit.
    scatters: Vec<Reference>,
    /// Last all-reduce of each unit, or reduce-scatter of its sums.
    all_reduces: Vec<Reference>,
    /// Gather of each unit's slices.
    slices: Vec<Reference>,
    /// Indices in the block of the statistics that are under way.
    statistics: Vec<(Operation, usize)>,
    /// Whether the thread looks for complete reduce-scatters in the block.
    looks: bool,
}

impl Script {
    pub(super) fn new(plan: &Arc<Plan>, placement: ModelPlacement) -> Self {
        let rules = Rules {
            sequences: match placement {
                ModelPlacement::Host => Sequences::OfEachChannel,
                ModelPlacement::Device => Sequences::One,
            },
            order: UnitOrder::Error,
            uneven: Uneven::ZeroWeight,
            ..Rules::default()
        };
        let none = vec![Reference::Here(usize::MAX); plan.spec().units().len()];
        Self {
            plan: Arc::clone(plan),
            placement,
            machine: StepMachine::new(Arc::clone(plan), rules),
            blocks: Vec::new(),
            block: StepBlock { times: 1, ..StepBlock::default() },
            gathers: Vec::new(),
            scatters: none.clone(),
            all_reduces: none.clone(),
            slices: none,
            statistics: Vec::new(),
            looks: false,
        }
    }

    /// Runs the step, and returns its blocks.
    pub(super) fn run(mut self, microbatches: Microbatches) -> Vec<StepBlock> {
        let given = matches!(microbatches, Microbatches::Given(_));
        let count = microbatches.count().max(1);
        let not_last = if given { count - 1 } else { count };
        // A microbatch that waits for slices is a block of its own. The machine makes one
        // microbatch for all others that are not known to be the last.
        let waiting = if self.plan.divides_state() { not_last.min(1) } else { 0 };
        let repeated = not_last - waiting;
        let of_machine = waiting + repeated.min(1) + 1;
        let microbatches = given.then(|| usize::try_from(of_machine).expect("three at most"));
        if self.plan.divides_state() {
            self.update();
            self.end_block(0);
        }
        let intent = Intent::Step { microbatches, input: Input::Ready };
        self.feed(|machine| machine.begin(Begin { step: 0, intent }));
        self.end_block(0);
        if waiting > 0 {
            self.microbatch();
            self.end_block(0);
        }
        if repeated > 0 {
            self.block.times = repeated;
            self.microbatch();
            self.end_block(waiting);
        }
        if given {
            self.microbatch();
        }
        let last = count - 1;
        self.block.microbatch = last;
        self.feed(StepMachine::finish);
        self.end_block(last);
        self.blocks
    }

    /// Updates the slices of all units.
    fn update(&mut self) {
        let plan = Arc::clone(&self.plan);
        for unit in plan.update_order() {
            self.compute(Work::UpdateSlice(unit));
            self.feed(|machine| machine.updated(unit));
        }
        // A step begins where the update has ended.
        self.act(Action::Read);
    }

    fn microbatch(&mut self) {
        self.feed(StepMachine::begin_microbatch);
        self.forward_and_backward();
        self.feed(StepMachine::end_microbatch);
    }

    fn forward_and_backward(&mut self) {
        let plan = Arc::clone(&self.plan);
        for unit in plan.order() {
            self.feed(|machine| machine.need(*unit));
            self.compute(Work::Forward(*unit));
            for index in 0..plan.spec()[*unit].statistics.len() {
                self.feed(|machine| machine.statistics(*unit, index, Phase::Forward));
            }
        }
        // `Pass::loss` takes a number: the host reads it.
        self.compute(Work::Loss);
        self.act(Action::Read);
        self.feed(StepMachine::loss);
        for unit in plan.order().iter().rev() {
            let spec = &plan.spec()[*unit];
            match spec.after_forward {
                AfterForward::Reshard => self.feed(|machine| machine.need(*unit)),
                AfterForward::Keep => {}
                AfterForward::Discard => continue,
            }
            self.compute(Work::Backward(*unit));
            for index in (0..spec.statistics.len()).rev() {
                self.feed(|machine| machine.statistics(*unit, index, Phase::Backward));
            }
            if spec.is_trainable() {
                self.feed(|machine| machine.offer(*unit));
            }
        }
    }

    /// Feeds an input, and writes down the outputs. A gather that is issued ahead, and whose slices
    /// are not whole, is issued where its unit is needed: no wait for slices is reported before.
    fn feed(&mut self, input: impl FnOnce(&mut StepMachine) -> Result<(), Refused>) {
        input(&mut self.machine).expect("the script keeps to the order of a step");
        let scattered = self.block.scatters.len();
        while let Some(output) = self.machine.poll() {
            self.write(output);
        }
        // The thread looks for complete reduce-scatters where it issues one.
        let watches = matches!(self.machine.watching(), Some(Operation::ReduceScatter(_)));
        if self.block.scatters.len() > scattered && watches {
            self.act(Action::IssueReady);
            self.looks = true;
        }
    }

    fn write(&mut self, output: Output) {
        match output {
            Output::Exchange(exchange) => self.exchange(exchange, output),
            Output::Gather { place, .. } => {
                let index = self.issue(output);
                self.gathers.truncate(place);
                self.gathers.push(index);
            }
            Output::ReduceScatter { unit, into, .. } => {
                if into == Target::NewPartial && self.block.times > 1 {
                    // The microbatches behind the first add to the partial.
                    let place = self.block.scatters.len();
                    self.act(Action::Settle(Reference::Earlier(place)));
                }
                let index = self.issue(output);
                self.block.scatters.push(index);
                self.scatters[unit.index()] = Reference::Here(index);
            }
            Output::AllReduce(unit) | Output::ScatterSums(unit) => {
                let index = self.issue(output);
                self.all_reduces[unit.index()] = Reference::Here(index);
                if self.looks {
                    self.block.all_reduces.push((self.scatters[unit.index()], index));
                }
            }
            Output::GatherSlices(unit) => {
                let index = self.issue(output);
                self.slices[unit.index()] = match self.placement {
                    // Outlasts the update.
                    ModelPlacement::Host => {
                        self.block.slices.push(index);
                        Reference::Slices(self.block.slices.len() - 1)
                    }
                    // Comes just before the unit's gather.
                    ModelPlacement::Device => Reference::Here(index),
                };
            }
            Output::Statistics { unit, index, phase, .. } => {
                let operation = Operation::Statistics { unit, index, phase };
                let index = self.issue(output);
                self.statistics.push((operation, index));
            }
            Output::Accumulate(unit) => self.compute(Work::Accumulate(unit)),
            Output::Fold(unit) => self.compute(Work::Fold(unit)),
            Output::Await(operation) => self.wait(operation, Action::Need),
            Output::Follow(operation) => self.wait(operation, Action::Settle),
            Output::Hand { .. } | Output::Free { .. } => {}
        }
    }

    fn wait(&mut self, operation: Operation, action: fn(Reference) -> Action) {
        let reference = match operation {
            Operation::Gather { place, .. } => Reference::Here(self.gathers[place]),
            Operation::ReduceScatter(unit) => self.scatters[unit.index()],
            Operation::AllReduce(unit) | Operation::ScatterSums(unit) => {
                self.all_reduces[unit.index()]
            }
            Operation::GatherSlices(unit) => self.slices[unit.index()],
            Operation::Statistics { .. } => {
                let at = self.statistics.iter().position(|(other, _)| *other == operation);
                Reference::Here(self.statistics.remove(at.expect("it was issued")).1)
            }
        };
        self.act(action(reference));
        self.machine.done(operation).expect("the machine waits for it");
    }

    fn exchange(&mut self, exchange: Exchange, output: Output) {
        let supply = |input| Supply::of(std::iter::once(input));
        let conclusion = match exchange {
            // A hint of weights, as each step but the first has one.
            Exchange::Headers => {
                Conclusion::Headers(Headers { weight_hint: 1, ..Headers::of_data(1) })
            }
            Exchange::Microbatch(input) => Conclusion::Supply(supply(input)),
            Exchange::Statement => {
                self.compute(Work::Norm);
                self.act(Action::Read);
                Conclusion::Agreed
            }
            _ => Conclusion::Agreed,
        };
        let index = self.issue(output);
        self.act(Action::Need(Reference::Here(index)));
        self.machine.conclude(conclusion).expect("the machine waits for it");
        match exchange {
            Exchange::Statement if !self.plan.divides_state() => self.compute(Work::Update),
            // No microbatch follows: the end of the step is a block of its own.
            Exchange::Microbatch(Input::Exhausted) => {
                self.end_block(self.block.microbatch + 1);
            }
            _ => {}
        }
    }

    fn issue(&mut self, output: Output) -> usize {
        let call = output.call(&self.plan).expect("the output issues a collective");
        self.block.operations.push(operation(call));
        let index = self.block.operations.len() - 1;
        self.act(Action::Issue(index));
        index
    }

    fn act(&mut self, action: Action) {
        self.block.actions.push(action);
    }

    fn compute(&mut self, work: Work) {
        self.act(Action::Compute(work));
    }

    /// Ends the block, which takes place from a microbatch on. What follows refers to its
    /// reduce-scatters as those of the microbatch before.
    fn end_block(&mut self, microbatch: u64) {
        self.looks = false;
        let next =
            StepBlock { times: 1, microbatch: self.block.microbatch, ..StepBlock::default() };
        let mut block = std::mem::replace(&mut self.block, next);
        block.microbatch = microbatch;
        let units = block.scatters.iter().map(|index| block.operations[*index].unit);
        for (place, unit) in units.enumerate() {
            let unit = unit.map_or(0, UnitId::index);
            self.scatters[unit] = Reference::Earlier(place);
        }
        self.blocks.push(block);
    }
}

fn operation(call: Call) -> StepOperation {
    let Call { kind, members, dtype, elements, unit } = call;
    let (channel, op, stage) = match kind {
        Kind::Gather => (Channel::Gather, Op::AllGather, Stage::Gather),
        Kind::ReduceScatter => (Channel::Reduce, Op::ReduceScatter, Stage::Reduce),
        Kind::AllReduce => (Channel::AllReduce, Op::AllReduce, Stage::AllReduce),
        Kind::ScatterSums => (Channel::AllReduce, Op::ReduceScatter, Stage::ScatterSums),
        Kind::GatherSlices => (Channel::AllReduce, Op::AllGather, Stage::GatherSlices),
        Kind::Statistics => (Channel::Statistics, Op::AllReduce, Stage::Statistics),
        Kind::Exchange(Exchange::Interim { .. } | Exchange::Statement) => {
            (Channel::Control, Op::AllGather, Stage::Agreement)
        }
        Kind::Exchange(Exchange::Batch(_) | Exchange::Mean) => {
            (Channel::Control, Op::AllGather, Stage::Evaluation)
        }
        Kind::Exchange(_) => (Channel::Control, Op::AllGather, Stage::Header),
    };
    StepOperation { channel, members, op, dtype, elements, stage, unit }
}
