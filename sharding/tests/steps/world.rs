//! A world of machines: an operation is complete when all of its members have issued it, and
//! nothing else. Which rank goes on next is drawn.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hsdp_sharding::step::{
    Batches, Begin, Conclusion, EvaluationKind, Exchange, Headers, Input, Intent, NextUnit,
    Operation, Output, Refused, Rules, Sequences, Source, StepMachine, Supply, UnitUse,
};
use hsdp_sharding::{Axis, FullCopies, Phase, Plan, Rank, UnitId};

/// A small generator of pseudo-random numbers, so that a schedule is one number.
#[derive(Clone, Debug)]
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end
    }

    /// Returns true once in `n` draws.
    pub(crate) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A call of a rank's program in a step or an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Begin(Begin),
    Microbatch,
    Need(UnitId),
    Statistics(UnitId, usize, Phase),
    Loss,
    Offer(UnitId),
    EndMicrobatch,
    Finish,
    Evaluate(EvaluationKind),
    Batch,
    EndBatch,
    EndEvaluation,
    Updated(UnitId),
    AwaitSlices,
    GatherAgain,
}

/// The channels in which a rank issues operations.
const CHANNELS: usize = 4;

/// The channel of statistics, which travel between hosts: they are in no stream of a device.
const STATISTICS: usize = 3;

/// One operation of a group, by its number in the sequence of the group.
type Key = (usize, usize, usize);

/// A rank of the world.
#[derive(Debug)]
struct Member {
    machine: StepMachine,
    script: Vec<Call>,
    /// Number of calls so far.
    calls: usize,
    /// By channel: number of operations issued.
    issued: [usize; CHANNELS],
    /// The operations that are under way, with their keys.
    under_way: Vec<(Operation, Key)>,
    /// Units whose slices are to be gathered.
    due: BTreeSet<UnitId>,
    /// In one sequence: all operations so far, and how many of the first ones are complete.
    stream: Vec<Key>,
    drained: usize,
    /// The number of the first ones on which the units depend that the program was handed.
    used: usize,
    /// Numbers of operations up to the last gather of each unit, for each phase.
    gathers: BTreeMap<(UnitId, bool), usize>,
    /// The operation or the exchange that the machine waits for.
    waits: Option<Wait>,
    /// Everything that it did, in words.
    words: Vec<String>,
    /// Error on which all ranks agree, if the step ended with one.
    ended: Option<Refused>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Operation(Operation),
    Exchange(usize),
    /// The device, whose values these statistics are.
    Device(Operation),
}

/// All ranks, and the operations that they have issued.
#[derive(Debug)]
pub(crate) struct World {
    plan: Arc<Plan>,
    rules: Rules,
    members: Vec<Member>,
    /// By operation: what each member has issued, in words.
    operations: BTreeMap<Key, Vec<(usize, String)>>,
    /// What each rank says in each exchange.
    exchanges: Vec<BTreeMap<usize, Exchange>>,
    /// The number of operations that the ranks have issued before each exchange.
    issued: Vec<usize>,
    /// Number of exchanges of each rank.
    said: Vec<usize>,
    draws: Draws,
    /// Hint of the weight of a microbatch that rank 0 gives in its headers.
    pub(crate) weight_hint: u64,
    /// Whether partials overflow.
    pub(crate) overflows: bool,
    /// Whether rank 0 names its samples.
    pub(crate) names_samples: bool,
    /// Whether gathers of slices may be lost, since the ranks have aborted something.
    lost: bool,
}

impl World {
    pub(crate) fn new(plan: Plan, rules: Rules, seed: u64) -> Self {
        let plan = Arc::new(plan);
        let member = |_| Member {
            machine: StepMachine::new(Arc::clone(&plan), rules),
            script: Vec::new(),
            calls: 0,
            issued: [0; CHANNELS],
            under_way: Vec::new(),
            due: BTreeSet::new(),
            stream: Vec::new(),
            drained: 0,
            used: 0,
            gathers: BTreeMap::new(),
            waits: None,
            words: Vec::new(),
            ended: None,
        };
        Self {
            members: plan.mesh().ranks().map(member).collect(),
            said: vec![0; plan.mesh().world_size()],
            plan,
            rules,
            operations: BTreeMap::new(),
            exchanges: Vec::new(),
            issued: Vec::new(),
            draws: Draws(seed | 1),
            weight_hint: 0,
            overflows: false,
            names_samples: false,
            lost: false,
        }
    }

    /// Runs the scripts of all ranks to their ends.
    ///
    /// # Errors
    /// The words of all ranks, if they are stuck, or issue different operations.
    pub(crate) fn run(&mut self, scripts: Vec<Vec<Call>>) -> Result<(), String> {
        self.load(scripts);
        self.run_on()
    }

    /// Gives all ranks their scripts. Ranks that have lost gathers of slices make them once more
    /// first, except where headers or records about batches say so.
    fn load(&mut self, scripts: Vec<Vec<Call>>) {
        let first = scripts.first().and_then(|script| script.first());
        let says_so = matches!(first, Some(Call::Begin(_) | Call::Evaluate(_)));
        // An update gathers all slices.
        let is_update = matches!(first, Some(Call::Updated(_)));
        let again = self.lost && self.plan.divides_state() && !says_so && !is_update;
        self.lost &= !again && !is_update;
        for (member, mut script) in self.members.iter_mut().zip(scripts) {
            if again {
                script.splice(..0, [Call::GatherAgain, Call::AwaitSlices]);
            }
            (member.script, member.calls, member.ended) = (script, 0, None);
            member.words.clear();
        }
    }

    /// Runs what is left of the scripts of all ranks.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub(crate) fn run_on(&mut self) -> Result<(), String> {
        loop {
            let mut order: Vec<usize> = (0..self.members.len()).collect();
            for at in (1..order.len()).rev() {
                order.swap(at, self.draws.below(at + 1));
            }
            // A rank goes on for as long as it is drawn, so that ranks may be far apart.
            let mut has_moved = false;
            for rank in order {
                let turns = 1 + self.draws.below(40);
                for _ in 0..turns {
                    if !self.go_on(rank)? {
                        break;
                    }
                    has_moved = true;
                }
            }
            if self.members.iter().all(|member| member.is_over()) {
                // Each rank has gathered each unit in a step that has ended well.
                let has_gathered = |it: &Member| {
                    it.ended.is_none() && it.words.iter().any(|it| it == "<statement>")
                };
                self.lost &= !self.members.iter().all(has_gathered);
                return self.check_ends();
            }
            if !has_moved {
                return Err(self.describe("stuck"));
            }
        }
    }

    /// Aborts the step on all ranks, wherever they are, as the ranks of a world do.
    pub(crate) fn abort(&mut self) {
        self.lost = true;
        self.operations.clear();
        self.exchanges.clear();
        self.issued.clear();
        self.said.fill(0);
        for member in &mut self.members {
            member.machine.abort();
            if self.plan.divides_state() {
                member.due = self.plan.update_order().collect();
            }
            (member.waits, member.issued) = (None, [0; CHANNELS]);
            (member.drained, member.calls) = (0, member.script.len());
            member.used = 0;
            member.under_way.clear();
            member.stream.clear();
        }
    }

    /// Whether a rank has ended the step: then all ranks have said their statements, and all end
    /// it.
    pub(crate) fn is_ended_anywhere(&self) -> bool {
        self.members.iter().any(|member| member.is_over())
    }

    /// Goes on for some turns, in which ranks may be left in the middle of a step.
    pub(crate) fn run_a_little(
        &mut self,
        scripts: Vec<Vec<Call>>,
        turns: usize,
    ) -> Result<(), String> {
        self.load(scripts);
        for _ in 0..turns {
            let rank = self.draws.below(self.members.len());
            self.go_on(rank)?;
        }
        Ok(())
    }

    pub(crate) fn machine(&self, rank: usize) -> &StepMachine {
        &self.members[rank].machine
    }

    /// Returns what a rank did, in words.
    pub(crate) fn words(&self, rank: usize) -> String {
        self.members[rank].words.join(" ")
    }

    /// Does the next thing that a rank can do. Returns false if there is none.
    fn go_on(&mut self, rank: usize) -> Result<bool, String> {
        let has_drained = self.drain(rank);
        match self.members[rank].waits {
            Some(Wait::Operation(operation)) => return self.wait(rank, operation),
            Some(Wait::Exchange(number)) => return self.conclude(rank, number),
            Some(Wait::Device(operation)) => {
                let member = &mut self.members[rank];
                if member.drained < member.used {
                    return Ok(has_drained);
                }
                member.waits = None;
                self.issue(rank, STATISTICS, operation, operation.to_string())?;
                return Ok(true);
            }
            None => {}
        }
        if let Some(output) = self.members[rank].machine.poll() {
            self.carry_out(rank, output)?;
            return Ok(true);
        }
        // A host may look for the completion that the machine watches, or not yet.
        if let Some(operation) = self.members[rank].machine.watching()
            && self.is_complete(rank, operation)
            && self.draws.once_in(2)
        {
            let member = &mut self.members[rank];
            member.under_way.retain(|(other, _)| *other != operation);
            member.machine.done(operation).expect("it is watched");
            return Ok(true);
        }
        self.call(rank)
    }

    fn call(&mut self, rank: usize) -> Result<bool, String> {
        let member = &mut self.members[rank];
        if member.is_over() {
            return Ok(false);
        }
        let call = member.script[member.calls];
        member.calls += 1;
        let machine = &mut member.machine;
        let answer = match call {
            Call::Begin(begin) => machine.begin(begin),
            Call::Microbatch => machine.begin_microbatch(),
            Call::Need(unit) => machine.need(unit),
            Call::Statistics(unit, index, phase) => machine.statistics(unit, index, phase),
            Call::Loss => machine.loss(),
            Call::Offer(unit) => machine.offer(unit),
            Call::EndMicrobatch | Call::EndBatch => machine.end_microbatch(),
            Call::Finish => machine.finish(),
            Call::Evaluate(kind) => machine.evaluate(kind),
            Call::Batch => machine.begin_batch(),
            Call::EndEvaluation => machine.end_evaluation(),
            Call::Updated(unit) => machine.updated(unit),
            Call::GatherAgain => machine.gather_again(),
            Call::AwaitSlices => machine.await_slices(),
        };
        // A refused call changes nothing: the program goes on with the next one.
        if let Err(refused) = answer {
            member.words.push(format!("!{refused}!"));
        } else if let Call::Updated(unit) = call {
            member.due.insert(unit);
        }
        Ok(true)
    }

    fn carry_out(&mut self, rank: usize, output: Output) -> Result<(), String> {
        let word = output.to_string();
        self.members[rank].words.push(word.clone());
        match output {
            Output::Gather { place, unit, phase } => {
                let member = &mut self.members[rank];
                let slices = Operation::GatherSlices(unit);
                let is_under_way =
                    member.under_way.iter().any(|(operation, _)| *operation == slices);
                if is_under_way || member.due.contains(&unit) {
                    return Err(self.describe(&format!("rank {rank} issues {word} too early")));
                }
                let issued = member.stream.len() + 1;
                member.gathers.insert((unit, phase == Phase::Backward), issued);
                self.issue(rank, 0, Operation::Gather { place, unit, phase }, word)
            }
            Output::Hand { unit, phase, .. } => {
                let member = &mut self.members[rank];
                member.used = member.used.max(member.gathers[&(unit, phase == Phase::Backward)]);
                Ok(())
            }
            Output::ReduceScatter { unit, .. } => {
                self.issue(rank, 1, Operation::ReduceScatter(unit), word)
            }
            Output::Statistics { unit, index, phase, from } => {
                let operation = Operation::Statistics { unit, index, phase };
                // A device computes them from the units that it was handed.
                if from == Source::Offered && self.rules.sequences == Sequences::One {
                    self.members[rank].waits = Some(Wait::Device(operation));
                    return Ok(());
                }
                self.issue(rank, STATISTICS, operation, word)
            }
            Output::AllReduce(unit) => self.issue(rank, 2, Operation::AllReduce(unit), word),
            Output::ScatterSums(unit) => self.issue(rank, 2, Operation::ScatterSums(unit), word),
            Output::GatherSlices(unit) => {
                self.members[rank].due.remove(&unit);
                self.issue(rank, 2, Operation::GatherSlices(unit), word)
            }
            Output::Await(operation) | Output::Follow(operation) => {
                self.members[rank].waits = Some(Wait::Operation(operation));
                Ok(())
            }
            Output::Exchange(exchange) => {
                let number = self.said[rank];
                self.said[rank] += 1;
                self.exchanges.resize(self.exchanges.len().max(number + 1), BTreeMap::new());
                self.exchanges[number].insert(rank, exchange);
                self.members[rank].waits = Some(Wait::Exchange(number));
                self.check_place(rank, number, exchange)
            }
            Output::Free { .. } | Output::Accumulate(_) | Output::Fold(_) => Ok(()),
        }
    }

    /// Checks that all ranks have issued equally many operations before an exchange, if these are
    /// one sequence. Then exchanges and operations are in one order on all ranks, except exchanges
    /// of weights and of units.
    fn check_place(
        &mut self,
        rank: usize,
        number: usize,
        exchange: Exchange,
    ) -> Result<(), String> {
        let issued = self.members[rank].stream.len();
        if number == self.issued.len() {
            self.issued.push(issued);
        }
        let first = self.issued[number];
        let is_anywhere = matches!(exchange, Exchange::Weights | Exchange::Unit { .. });
        if self.rules.sequences == Sequences::One && !is_anywhere && issued != first {
            let what = format!("rank {rank} comes to {exchange} after {issued}, not {first}");
            return Err(self.describe(&what));
        }
        Ok(())
    }

    fn issue(
        &mut self,
        rank: usize,
        channel: usize,
        operation: Operation,
        word: String,
    ) -> Result<(), String> {
        let group = self.group(rank, channel);
        let member = &mut self.members[rank];
        let key = (channel, group, member.issued[channel]);
        member.issued[channel] += 1;
        if let Some(at) = member.under_way.iter().position(|(other, _)| *other == operation) {
            return Err(self.describe(&format!("rank {rank} issues {word} twice, at {at}")));
        }
        member.under_way.push((operation, key));
        if channel != STATISTICS {
            member.stream.push(key);
        }
        let all = self.operations.entry(key).or_default();
        all.push((rank, word));
        let (first, expected) = &all[0];
        match all.iter().find(|(_, word)| word != expected) {
            None => Ok(()),
            Some((other, word)) => {
                let what = format!("rank {first} issues {expected}, rank {other} {word}");
                Err(self.describe(&what))
            }
        }
    }

    /// Waits for an operation. A host does not wait for a device.
    fn wait(&mut self, rank: usize, operation: Operation) -> Result<bool, String> {
        let on_device = self.rules.sequences == Sequences::One;
        let is_on_device = on_device && !matches!(operation, Operation::Statistics { .. });
        if !is_on_device && !self.is_complete(rank, operation) {
            return Ok(false);
        }
        let member = &mut self.members[rank];
        let is_under_way = member.under_way.iter().any(|(other, _)| *other == operation);
        if !is_under_way {
            return Err(self.describe(&format!("rank {rank} waits for {operation}, not issued")));
        }
        member.under_way.retain(|(other, _)| *other != operation);
        member.waits = None;
        member.machine.done(operation).expect("it waits for it");
        Ok(true)
    }

    /// Whether all members have issued an operation; in one sequence, and all before it.
    fn is_complete(&self, rank: usize, operation: Operation) -> bool {
        let member = &self.members[rank];
        let found = member.under_way.iter().find(|(other, _)| *other == operation);
        found.is_some_and(|(_, key)| self.has_all(*key))
    }

    fn has_all(&self, key: Key) -> bool {
        let (channel, group, _) = key;
        let members = (0..self.members.len()).filter(|rank| self.group(*rank, channel) == group);
        self.operations.get(&key).is_some_and(|issued| issued.len() == members.count())
    }

    /// In one sequence: completes the first operations of a rank's stream that are the first of the
    /// streams of all members. Returns whether there are any.
    fn drain(&mut self, rank: usize) -> bool {
        let mut has_drained = false;
        if self.rules.sequences != Sequences::One {
            return has_drained;
        }
        loop {
            let Some(key) = self.members[rank].stream.get(self.members[rank].drained).copied()
            else {
                return has_drained;
            };
            let (channel, group, _) = key;
            let members: Vec<usize> =
                (0..self.members.len()).filter(|it| self.group(*it, channel) == group).collect();
            let is_first = |member: &usize| {
                let member = &self.members[*member];
                let at = member.stream.iter().position(|other| *other == key);
                at.is_some_and(|at| at <= member.drained)
            };
            if !members.iter().all(is_first) {
                return has_drained;
            }
            has_drained = true;
            for member in members {
                let member = &mut self.members[member];
                let at = member.stream.iter().position(|other| *other == key);
                member.drained = member.drained.max(at.map_or(0, |at| at + 1));
            }
        }
    }

    fn conclude(&mut self, rank: usize, number: usize) -> Result<bool, String> {
        let records: Vec<Exchange> = self.exchanges[number].values().copied().collect();
        if records.len() < self.members.len() {
            return Ok(false);
        }
        let conclusion = self.conclusion(rank, &records)?;
        let member = &mut self.members[rank];
        member.waits = None;
        if let Err(refused) = member.machine.conclude(conclusion) {
            if matches!(refused, Refused::OutOfTurn { .. }) {
                return Err(self.describe(&format!("rank {rank} does not take the conclusion")));
            }
            // The step is over on all ranks.
            member.words.push(format!("!{refused}!"));
            member.machine.abort();
            member.calls = member.script.len();
            member.ended = Some(refused);
        } else if matches!(records[0], Exchange::Headers | Exchange::Microbatch(_))
            && !member.machine.is_in_step()
            && member.is_at_end_of_run()
        {
            member.calls = member.script.len();
        }
        Ok(true)
    }

    fn conclusion(&self, rank: usize, records: &[Exchange]) -> Result<Conclusion, String> {
        let differ = || {
            let words: Vec<String> = records.iter().map(ToString::to_string).collect();
            self.describe(&format!("rank {rank} meets {}", words.join(", ")))
        };
        let gathers_again = self.lost && self.plan.divides_state();
        let supply = |input: fn(&Exchange) -> Option<Input>| {
            let inputs: Option<Vec<Input>> = records.iter().map(input).collect();
            inputs.map(|inputs| Supply::of(inputs.into_iter())).ok_or_else(differ)
        };
        match records[0] {
            Exchange::Headers => {
                if records.iter().any(|it| *it != Exchange::Headers) {
                    return Err(differ());
                }
                let intents = || self.members.iter().map(Member::intent);
                let inputs = intents().map(|intent| match intent {
                    Intent::Step { input, .. } => input,
                    Intent::End => Input::Exhausted,
                });
                let ending = (0..).map(Rank::new).zip(intents());
                let ending = ending.filter(|(_, intent)| *intent == Intent::End);
                Ok(Conclusion::Headers(Headers {
                    supply: Supply::of(inputs),
                    ending: ending.map(|(rank, _)| rank).collect(),
                    weight_hint: self.weight_hint,
                    names_samples: self.names_samples,
                    gathers_again,
                }))
            }
            Exchange::Microbatch(_) => supply(|it| match it {
                Exchange::Microbatch(input) => Some(*input),
                _ => None,
            })
            .map(Conclusion::Supply),
            Exchange::Batch(_) => supply(|it| match it {
                Exchange::Batch(input) => Some(*input),
                _ => None,
            })
            .map(|supply| Conclusion::Batches(Batches { supply, gathers_again })),
            Exchange::Unit { .. } => {
                let said = records.iter().map(|it| match it {
                    Exchange::Unit { says, place } => Some((*says, *place)),
                    _ => None,
                });
                let said: Vec<(UnitUse, usize)> = said.collect::<Option<_>>().ok_or_else(differ)?;
                let (place, next) = NextUnit::of(&said, self.plan.order());
                Ok(Conclusion::Unit(place, next))
            }
            Exchange::Interim { .. } => {
                let issued = records.iter().map(|it| match it {
                    Exchange::Interim { all_reduces } => Some(*all_reduces),
                    _ => None,
                });
                let issued: Vec<usize> = issued.collect::<Option<_>>().ok_or_else(differ)?;
                let most = issued.into_iter().max();
                Ok(Conclusion::Overflow(most.filter(|_| self.overflows)))
            }
            first if records.iter().all(|it| *it == first) => Ok(Conclusion::Agreed),
            _ => Err(differ()),
        }
    }

    /// Checks, when all ranks are at their ends, that all operations are complete, and that all
    /// ranks ended in the same way.
    fn check_ends(&mut self) -> Result<(), String> {
        let aborted = self.members[0].ended.clone();
        if self.members.iter().any(|member| member.ended != aborted) {
            return Err(self.describe("ranks end in different ways"));
        }
        if aborted.is_some() {
            self.abort();
            return Ok(());
        }
        let mut drains = true;
        while drains {
            drains = false;
            for rank in 0..self.members.len() {
                drains |= self.drain(rank);
            }
        }
        let is_drained = |member: &Member| member.drained == member.stream.len();
        let one = self.rules.sequences == Sequences::One;
        if one && !self.members.iter().all(is_drained) {
            return Err(self.describe("the streams are stuck"));
        }
        let keys: Vec<Key> = self.operations.keys().copied().collect();
        match keys.into_iter().find(|key| !self.has_all(*key)) {
            Some(key) => Err(self.describe(&format!("a member of {key:?} is missing"))),
            None => Ok(()),
        }
    }

    /// The group of a rank in a channel, by its first rank.
    fn group(&self, rank: usize, channel: usize) -> usize {
        let axis = match channel {
            0 if self.plan.options().full_copies == FullCopies::PerProcess => return 0,
            2 => Axis::Replicate,
            _ => Axis::Shard,
        };
        self.plan.mesh().group(axis, Rank::new(rank))[0].index()
    }

    fn describe(&self, what: &str) -> String {
        let ranks = self.members.iter().enumerate().map(|(rank, member)| {
            let words = member.words.join(" ");
            let waits = &member.waits;
            let next = member.script.get(member.calls);
            format!("\n  rank {rank}: {words}, waits {waits:?}, next {next:?}")
        });
        format!("{what}; {:?}{}", self.rules, ranks.collect::<String>())
    }
}

impl Member {
    fn is_over(&self) -> bool {
        self.calls >= self.script.len() && self.waits.is_none() && self.machine.is_idle()
    }

    fn intent(&self) -> Intent {
        let begin = self.script.iter().find_map(|call| match call {
            Call::Begin(begin) => Some(begin.intent),
            _ => None,
        });
        begin.unwrap_or(Intent::End)
    }

    /// Whether a step that was to begin does not take place.
    fn is_at_end_of_run(&self) -> bool {
        self.machine.is_idle()
    }
}
