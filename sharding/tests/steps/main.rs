//! The order of steps on whole worlds of machines. PROTOCOL.md of the runtime, "Why every rank
//! issues the same".
//!
//! Each of these changes to the machine was made on purpose, one at a time, and these tests found
//! it:
//!
//! | change | found as |
//! |---|---|
//! | an all-reduce waits for its reduce-scatter while the microbatch goes on | stuck |
//! | a reduce-scatter is waited for where it is issued | stuck |
//! | mode `Every`: sums are all-reduced before the gathers are over | stuck |
//! | the rest of the forward is not gathered before the first exchange about units | stuck |
//! | gathers beyond the place of a conclusion are not dropped | no order of all units |
//! | the order of an aborted step is kept | ranks in different exchanges |
//! | the loss does not issue the rest of the forward's gathers | stuck |
//! | a rank makes only the gathers that it uses | stuck |
//! | reductions are issued in the order of the offers | different operations |
//! | units that were not offered are not reduced | stuck |
//! | after an overflow each rank stops where it is | stuck |
//! | in one sequence a reduction is issued one gather too early | stuck |
//! | in one sequence reductions do not come before the next gather | stuck |
//! | a rank without data leaves out the microbatches of others | stuck |
//! | a rank without a loss leaves out the exchange of weights | stuck |
//! | a rank that has used no unit does not gather along | stuck |
//! | a rank that gathers along leaves out the statistics between the gathers | stuck |
//! | statistics that a program leaves out do not come before its next unit | stuck |
//! | statistics that a program leaves out do not come before an exchange about units | stuck |
//! | statistics that a program leaves out are not issued at the end | stuck |
//! | sums of zeros are waited for where they are issued | stuck |
//! | sums of zeros are not waited for before units are gathered again | issued twice |
//! | statistics of the backward do not issue the gathers before them | stuck |
//! | a batch of an evaluation ends without the gathers of its backward | issued twice |

mod world;

use std::sync::Arc;

use hsdp_sharding::step::{
    Begin, Call as Collective, DryRun, EvaluationKind, Input, Intent, Kind, LossScale, Members,
    MicrobatchWeights, ReductionTime, Rules, Sequences, Uneven, UnitOrder,
};
use hsdp_sharding::{
    Accumulation, AfterForward, ByteCount, Flow, FullCopies, Mesh, ModelSpec, Param, Phase, Plan,
    PlanOptions, Rank, StateOver, Unit, UnitId,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

use crate::world::{Call, Draws, World};

fn cases(cases: u32) -> ProptestConfig {
    let rng_seed = RngSeed::Fixed(0x6873_6470);
    ProptestConfig { cases, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
}

/// A model, its mesh and its options, and the same with state over the world.
fn plan_over_world() -> impl Strategy<Value = Plan> {
    (plan(), any::<bool>()).prop_map(|(plan, is_over_world)| {
        if !is_over_world || plan.options().full_copies == FullCopies::PerProcess {
            return plan;
        }
        let options = PlanOptions { state: StateOver::World, ..*plan.options() };
        Plan::new(plan.spec().clone(), plan.mesh(), options).expect("a plan")
    })
}

/// A model, its mesh and its options.
fn plan() -> impl Strategy<Value = Plan> {
    let unit = (0..4_u8, any::<bool>(), prop_oneof![3 => Just(0), 1 => 1..3_usize]);
    let model = prop::collection::vec(unit, 1..=5).prop_map(|units| {
        units.into_iter().enumerate().fold(
            ModelSpec::new(),
            |spec, (at, (kind, after, statistics))| {
                let weight = Param::new(format!("{at}.weight"), [7]);
                let unit = Unit::new(format!("{at}"));
                let statistics = if kind == 0 { 0 } else { statistics };
                let unit = (0..statistics)
                    .fold(unit, |unit, norm| unit.batch_norm(&format!("{at}.{norm}"), 3));
                let unit = unit.param(if kind == 0 { weight.frozen() } else { weight });
                spec.unit(match (kind, after) {
                    (0, true) => unit.forward_only(),
                    (1, true) => unit.keep(),
                    _ => unit,
                })
            },
        )
    });
    let options = (
        prop::sample::select(&Accumulation::ALL[..]),
        prop_oneof![0..3_usize, Just(usize::MAX)],
        prop::sample::select(&FullCopies::ALL[..]),
    );
    (model, 1..=3_usize, 1..=3_usize, options).prop_map(|(spec, replicas, shards, options)| {
        let (accumulation, prefetch, full_copies) = options;
        let options = PlanOptions { accumulation, prefetch, full_copies, ..PlanOptions::default() };
        Plan::new(spec, Mesh::new(replicas, shards).expect("a mesh"), options).expect("a plan")
    })
}

fn rules() -> impl Strategy<Value = Rules> {
    (
        prop::sample::select(vec![Sequences::OfEachChannel, Sequences::One]),
        prop::sample::select(vec![UnitOrder::Follow, UnitOrder::Error]),
        prop::sample::select(vec![Uneven::Error, Uneven::Stop, Uneven::ZeroWeight]),
        prop::sample::select(vec![ReductionTime::InTurn, ReductionTime::AtTheEnd]),
        prop::sample::select(vec![MicrobatchWeights::Enter, MicrobatchWeights::Ignored]),
        prop::sample::select(vec![LossScale::Fixed, LossScale::Dynamic]),
        prop::option::of((1..3_u64).prop_map(|every| every.try_into().expect("above 0"))),
    )
        .prop_map(|(sequences, order, uneven, reductions, weights, loss_scale, compared)| {
            Rules {
                sequences,
                order,
                uneven,
                reductions,
                // Ranks without data need weights.
                weights: if uneven == Uneven::ZeroWeight {
                    MicrobatchWeights::Enter
                } else {
                    weights
                },
                loss_scale,
                compare_replicas: compared,
            }
        })
}

/// Programs of a world in a microbatch.
struct Programs<'a> {
    plan: &'a Plan,
    draws: Draws,
    /// The order in which most ranks use the units.
    order: Vec<UnitId>,
}

impl<'a> Programs<'a> {
    fn new(plan: &'a Plan, seed: u64) -> Self {
        let mut programs = Self { plan, draws: Draws(seed | 1), order: plan.order().to_vec() };
        if programs.draws.once_in(2) {
            programs.order = programs.shuffled(plan.order());
        }
        programs
    }

    fn shuffled(&mut self, units: &[UnitId]) -> Vec<UnitId> {
        let mut units = units.to_vec();
        for at in (1..units.len()).rev() {
            units.swap(at, self.draws.below(at + 1));
        }
        units
    }

    /// The units that a rank uses, most often all in the order of the others.
    fn used(&mut self) -> Vec<UnitId> {
        let order = self.order.clone();
        let units = if self.draws.once_in(6) { self.shuffled(&order) } else { order };
        let skips = self.draws.once_in(4);
        units.into_iter().filter(|_| !(skips && self.draws.once_in(3))).collect()
    }

    /// The calls about statistics of a unit.
    fn statistics(&self, unit: UnitId, phase: Phase) -> Vec<Call> {
        let indices = 0..self.plan.spec()[unit].statistics.len();
        let mut calls: Vec<Call> =
            indices.map(|index| Call::Statistics(unit, index, phase)).collect();
        if phase == Phase::Backward {
            calls.reverse();
        }
        calls
    }

    fn forward(&self, unit: UnitId) -> Vec<Call> {
        [vec![Call::Need(unit)], self.statistics(unit, Phase::Forward)].concat()
    }

    fn backward(&self, unit: UnitId) -> Vec<Call> {
        let statistics = self.statistics(unit, Phase::Backward);
        [vec![Call::Need(unit)], statistics, vec![Call::Offer(unit)]].concat()
    }

    /// A microbatch that uses all units, and reduces all that are trained.
    fn plain_microbatch(&self) -> Vec<Call> {
        let mut calls = vec![Call::Microbatch];
        calls.extend(self.order.iter().flat_map(|unit| self.forward(*unit)));
        calls.push(Call::Loss);
        for unit in self.order.iter().rev() {
            let spec = &self.plan.spec()[*unit];
            calls
                .extend((spec.after_forward == AfterForward::Reshard).then_some(Call::Need(*unit)));
            calls.extend(self.statistics(*unit, Phase::Backward));
            calls.extend(spec.is_trainable().then_some(Call::Offer(*unit)));
        }
        calls.push(Call::EndMicrobatch);
        calls
    }

    fn microbatch(&mut self, calls: &mut Vec<Call>) {
        calls.push(Call::Microbatch);
        let used = self.used();
        for unit in &used {
            let skips = self.draws.once_in(12);
            calls.extend(self.forward(*unit).into_iter().take(if skips { 1 } else { usize::MAX }));
        }
        if !self.draws.once_in(8) {
            calls.push(Call::Loss);
        }
        let back: Vec<UnitId> = used.into_iter().rev().collect();
        let mut backward: Vec<Call> = back.iter().flat_map(|unit| self.backward(*unit)).collect();
        if self.draws.once_in(4) {
            // Gradients that come late, or never, and calls that have no place.
            let len = backward.len();
            for _ in 0..len {
                backward.swap(self.draws.below(len), self.draws.below(len));
            }
            backward.truncate(len - self.draws.below(len + 1) / 2);
        }
        calls.extend(backward);
        calls.push(Call::EndMicrobatch);
    }

    /// A step of all ranks.
    fn step(&mut self, rules: &Rules, number: u64) -> Vec<Vec<Call>> {
        let is_given = self.draws.once_in(2);
        let count = 1 + self.draws.below(3);
        let is_even = rules.uneven != Uneven::ZeroWeight && !self.draws.once_in(6);
        let mut scripts = Vec::new();
        for _ in 0..self.plan.mesh().world_size() {
            let own = if is_even { count } else { self.draws.below(count + 1) };
            let has_data = is_even || own > 0 && !self.draws.once_in(5);
            let input = if has_data { Input::Ready } else { Input::Exhausted };
            let microbatches = is_given.then_some(count);
            let intent = Intent::Step { microbatches, input };
            let mut calls = vec![Call::Begin(Begin { step: number, intent })];
            // With a given number and data, only weights of 0 allow fewer.
            let own = match (is_given, rules.uneven) {
                (true, Uneven::Error | Uneven::Stop) => count,
                _ => own,
            };
            for _ in 0..if has_data { own } else { 0 } {
                self.microbatch(&mut calls);
            }
            calls.push(Call::Finish);
            scripts.push(calls);
        }
        scripts
    }

    fn evaluation(&mut self) -> Vec<Vec<Call>> {
        let kind = match self.draws.once_in(2) {
            true => EvaluationKind::ForwardOnly,
            false => EvaluationKind::WithBackward,
        };
        let ranks = 0..self.plan.mesh().world_size();
        ranks
            .map(|_| {
                let mut calls = vec![Call::Evaluate(kind)];
                for _ in 0..self.draws.below(3) {
                    calls.push(Call::Batch);
                    let used = self.used();
                    calls.extend(used.iter().copied().map(Call::Need));
                    if kind == EvaluationKind::WithBackward {
                        calls.extend(self.needed_again(used).into_iter().map(Call::Need));
                    }
                    calls.push(Call::EndBatch);
                }
                calls.push(Call::EndEvaluation);
                calls
            })
            .collect()
    }

    /// The units that the backward of another model needs again, most often all that were used, and
    /// sometimes in a strange order, or the first of them.
    fn needed_again(&mut self, used: Vec<UnitId>) -> Vec<UnitId> {
        let mut again: Vec<UnitId> = used.into_iter().rev().collect();
        if self.draws.once_in(4) {
            again = self.shuffled(&again);
        }
        if self.draws.once_in(3) {
            again.truncate(self.draws.below(again.len() + 1));
        }
        again
    }

    /// The update of all ranks. It is left out after a step that is skipped.
    fn update(&mut self) -> Vec<Vec<Call>> {
        let is_skipped = !self.plan.divides_state() || self.draws.once_in(6);
        let units = self.plan.update_order().filter(|_| !is_skipped);
        let mut calls: Vec<Call> = units.map(Call::Updated).collect();
        calls.extend(self.draws.once_in(6).then_some(Call::AwaitSlices));
        vec![calls; self.plan.mesh().world_size()]
    }

    fn end_of_run(&mut self) -> Vec<Vec<Call>> {
        let begin = Call::Begin(Begin { step: 9, intent: Intent::End });
        vec![vec![begin]; self.plan.mesh().world_size()]
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    /// No rank is ever stuck, and all ranks issue the same operations in each channel, whatever the
    /// programs do, whichever rank goes on next, and whenever operations complete.
    #[test]
    fn no_rank_is_ever_stuck(
        plan in plan_over_world(), rules in rules(), seed in any::<u64>(),
        worlds in any::<[bool; 3]>()
    ) {
        let shares_memory = plan.options().full_copies == FullCopies::PerProcess;
        prop_assume!(!(shares_memory && rules.sequences == Sequences::One));
        let mut programs = Programs::new(&plan, seed.rotate_left(17));
        let mut world = World::new(plan.clone(), rules, seed);
        [world.overflows, world.names_samples, _] = worlds;
        world.weight_hint = u64::from(worlds[2]);
        for number in 0..3 {
            if programs.draws.once_in(5) {
                // An attempt that is aborted in its middle.
                let turns = programs.draws.below(400);
                let scripts = programs.step(&rules, number);
                world.run_a_little(scripts, turns).map_err(TestCaseError::fail)?;
                if world.is_ended_anywhere() {
                    world.run_on().map_err(TestCaseError::fail)?;
                } else {
                    world.abort();
                }
            }
            let scripts = programs.step(&rules, number);
            world.run(scripts).map_err(TestCaseError::fail)?;
            let scripts = programs.update();
            world.run(scripts).map_err(TestCaseError::fail)?;
            if programs.draws.once_in(3) {
                let scripts = programs.evaluation();
                world.run(scripts).map_err(TestCaseError::fail)?;
            }
        }
        let scripts = programs.end_of_run();
        world.run(scripts).map_err(TestCaseError::fail)?;
    }

    /// From the second step on, calls are those of the plan's traffic, which is a closed form, and
    /// nothing is gathered that is not used.
    #[test]
    fn calls_are_those_of_the_traffic(
        plan in plan_over_world(), rules in rules(), seed in any::<u64>(), microbatches in 1..4_usize,
        is_given in any::<bool>()
    ) {
        let shares_memory = plan.options().full_copies == FullCopies::PerProcess;
        prop_assume!(!(shares_memory && rules.sequences == Sequences::One));
        let mut programs = Programs::new(&plan, seed.rotate_left(17));
        if rules.order == UnitOrder::Error {
            programs.order = plan.order().to_vec();
        }
        let mut world = World::new(plan.clone(), rules, seed);
        for number in 0..2 {
            let mut calls = vec![Call::Begin(Begin::step(number, is_given.then_some(microbatches)))];
            (0..microbatches).for_each(|_| calls.extend(programs.plain_microbatch()));
            calls.push(Call::Finish);
            let updated = plan.update_order().filter(|_| plan.divides_state());
            calls.extend(updated.map(Call::Updated));
            let scripts = vec![calls; plan.mesh().world_size()];
            world.run(scripts).map_err(TestCaseError::fail)?;
        }
        for rank in 0..plan.mesh().world_size() {
            let words = world.words(rank);
            prop_assert!(!words.contains('!'), "{words}");
            prop_assert!(world.machine(rank).is_settled());
            prop_assert_eq!(world.machine(rank).plan().order(), &*programs.order);
            let issued = |kind: char| words.split(' ').filter(|it| it.starts_with(kind)).count() as u64;
            let planned = plan.traffic(Rank::new(rank), microbatches as u64);
            let mesh = plan.mesh();
            let gathers_over = match plan.options().full_copies {
                FullCopies::PerRank => mesh.shard_size(),
                FullCopies::PerProcess => mesh.world_size(),
            };
            // Over one rank there is nothing to count.
            let expected = |calls: u64, members: usize, kind| if members > 1 { calls } else { issued(kind) };
            prop_assert_eq!(issued('g'), expected(planned.all_gather.calls, gathers_over, 'g'), "{}", words);
            prop_assert_eq!(issued('r'), expected(planned.reduce_scatter.calls, mesh.shard_size(), 'r'), "{}", words);
            prop_assert_eq!(issued('a'), planned.all_reduce.calls, "{}", words);
            prop_assert_eq!(issued('c'), planned.scatter_sums.calls, "{}", words);
            prop_assert_eq!(issued('h'), planned.gather_slices.calls, "{}", words);
            prop_assert_eq!(issued('s'), expected(planned.statistics.calls, mesh.world_size(), 's'), "{}", words);
            prop_assert_eq!(words.split(' ').filter(|it| it.starts_with('d')).count(), 0, "{}", words);
        }
    }

    /// Traffic is the sum over the collectives of a step, each with the bytes that the other
    /// members give.
    #[test]
    fn traffic_is_a_sum_over_the_collectives_of_a_step(
        plan in plan_over_world(), rules in rules(), microbatches in 1..4_usize,
        is_given in any::<bool>()
    ) {
        let rules = Rules { order: UnitOrder::Error, ..rules };
        let plan = Arc::new(plan);
        let given = is_given.then_some(microbatches);
        let step = DryRun::of(&plan, rules, given, microbatches);
        for rank in plan.mesh().ranks() {
            let mut sums = [Flow::NONE; 6];
            for call in step.outputs().filter_map(|output| output.call(&plan)) {
                let Some((kind, bytes)) = received(&plan, rank, call) else { continue };
                sums[kind] = sums[kind] + Flow { calls: 1, bytes: ByteCount(bytes) };
            }
            let planned = plan.traffic(rank, microbatches as u64);
            let planned = [
                planned.all_gather,
                planned.reduce_scatter,
                planned.all_reduce,
                planned.statistics,
                planned.scatter_sums,
                planned.gather_slices,
            ];
            prop_assert_eq!(sums, planned, "rank {}", rank);
        }
    }
}

/// A rank that uses no unit in the forward that finds the order gathers those of the others. Units
/// that are kept are there for its backward, as where the order is known.
#[test]
fn a_kept_unit_that_a_rank_gathers_along_is_there_for_its_backward() {
    let unit = |at| Unit::new(format!("{at}")).param(Param::new(format!("{at}.weight"), [7]));
    let spec = ModelSpec::new().unit(unit(0)).unit(unit(1).keep());
    let mesh = Mesh::new(1, 2).expect("a mesh");
    let plan = Plan::new(spec, mesh, PlanOptions::default()).expect("a plan");
    let [first, kept] = [0, 1].map(UnitId::new);
    for order in [[first, kept], [kept, first]] {
        let begin = [Call::Begin(Begin::step(0, Some(1))), Call::Microbatch];
        let end = [Call::Offer(kept), Call::EndMicrobatch, Call::Finish];
        let using = [Call::Need(order[0]), Call::Need(order[1]), Call::Loss];
        let without = [Call::Loss, Call::Need(kept)];
        let scripts =
            vec![[&begin[..], &using, &end].concat(), [&begin[..], &without, &end].concat()];
        let mut world = World::new(plan.clone(), Rules::default(), 1);
        world.run(scripts).expect("no rank is stuck");
        let words = world.words(1);
        assert!(words.contains("u1") && !words.contains('!'), "{order:?}: {words}");
    }
}

/// A batch of an evaluation with a backward has the gathers of a microbatch, and nothing else,
/// whether a rank comes to the backward, ends its batch before, or has no batch.
#[test]
fn an_evaluation_with_a_backward_has_the_gathers_of_a_microbatch() {
    let unit = |at| Unit::new(format!("{at}")).param(Param::new(format!("{at}.weight"), [7]));
    let embedding = Unit::new("4").param(Param::new("4.weight", [7]).frozen()).forward_only();
    let spec = [unit(0), unit(1).keep(), unit(2), unit(3), embedding];
    let spec = spec.into_iter().fold(ModelSpec::new(), ModelSpec::unit);
    let mesh = Mesh::new(2, 2).expect("a mesh");
    let plan = Plan::new(spec, mesh, PlanOptions::default()).expect("a plan");
    let forward: Vec<Call> = plan.order().iter().copied().map(Call::Need).collect();
    let backward = [3, 2, 0].map(|unit| Call::Need(UnitId::new(unit)));
    let script = |batch: Option<&[Call]>| {
        let batch = batch.map(|calls| [&[Call::Batch], calls, &[Call::EndBatch]].concat());
        let begin = vec![Call::Evaluate(EvaluationKind::WithBackward)];
        [begin, batch.unwrap_or_default(), vec![Call::EndEvaluation]].concat()
    };
    let whole = [&forward[..], &backward].concat();
    let scripts =
        vec![script(Some(&whole)), script(Some(&forward)), script(None), script(Some(&whole))];
    let want: Vec<String> = plan
        .gathers()
        .iter()
        .map(|gather| match gather.phase {
            Phase::Forward => format!("g{}", gather.unit),
            Phase::Backward => format!("g{}'", gather.unit),
        })
        .collect();
    for sequences in [Sequences::OfEachChannel, Sequences::One] {
        for order in [UnitOrder::Follow, UnitOrder::Error] {
            let rules = Rules { sequences, order, ..Rules::default() };
            let mut world = World::new(plan.clone(), rules, 3);
            world.run(scripts.clone()).expect("no rank is stuck");
            for rank in 0..mesh.world_size() {
                let words = world.words(rank);
                let issued = words.split(' ').filter(|it| it.starts_with(['g', 'r', 'a', 's']));
                assert_eq!(issued.collect::<Vec<_>>(), want, "{rules:?}, rank {rank}: {words}");
            }
            assert!(!world.words(0).contains(['d', '!']), "{}", world.words(0));
        }
    }
}

/// The reason for the one sequence on devices: where channels are independent, a rank without data
/// issues their operations in another order than the others. Ranks that have few operations under
/// way would wait for each other.
#[test]
fn a_rank_without_data_issues_in_the_order_of_the_others_in_one_sequence_alone() {
    let unit = |at| Unit::new(format!("{at}")).param(Param::new(format!("{at}.weight"), [24]));
    let spec = ModelSpec::new().unit(unit(0)).unit(unit(1).keep()).unit(unit(2)).unit(unit(3));
    let mesh = Mesh::new(2, 2).expect("a mesh");
    let plan = Plan::new(spec, mesh, PlanOptions::default()).expect("a plan");
    let mut programs = Programs::new(&plan, 1);
    programs.order = plan.order().to_vec();
    let script = |input, microbatches| {
        let intent = Intent::Step { microbatches: Some(2), input };
        let mut calls = vec![Call::Begin(Begin { step: 0, intent })];
        (0..microbatches).for_each(|_| calls.extend(programs.plain_microbatch()));
        calls.push(Call::Finish);
        calls
    };
    let mut scripts = vec![script(Input::Ready, 2); mesh.world_size()];
    scripts[0] = script(Input::Exhausted, 0);
    for (sequences, seed) in
        [Sequences::OfEachChannel, Sequences::One].into_iter().flat_map(|it| [(it, 1), (it, 2)])
    {
        let uneven = Uneven::ZeroWeight;
        let order = UnitOrder::Error;
        let mut world =
            World::new(plan.clone(), Rules { sequences, uneven, order, ..Rules::default() }, seed);
        world.run(scripts.clone()).expect("no rank is stuck");
        let [without, with] = [0, 1].map(|rank| {
            let words = world.words(rank);
            let issued = words.split(' ').filter(|it| it.starts_with(['g', 'r', 'a']));
            issued.map(str::to_owned).collect::<Vec<_>>()
        });
        let sorted = |issued: &[String]| {
            let mut issued = issued.to_vec();
            issued.sort_unstable();
            issued
        };
        assert_eq!(sorted(&without), sorted(&with));
        assert_eq!(without == with, sequences == Sequences::One, "{without:?}, {with:?}");
    }
}

/// Returns the kind of a collective of units, and the bytes that a rank receives from other
/// members; nothing if there are none.
fn received(plan: &Plan, rank: Rank, call: Collective) -> Option<(usize, u64)> {
    let mesh = plan.mesh();
    let size = call.dtype.size_bytes() as u64;
    let shards = mesh.shard_size() as u64;
    let replicas = mesh.replicate_size() as u64;
    let elements = call.elements as u64;
    if call.members.count(mesh) == 1 {
        return None;
    }
    Some(match call.kind {
        // One copy for all ranks, into the memory of the first.
        Kind::Gather if call.members == Members::World => {
            (0, if rank.index() == 0 { (shards - 1) * elements * size } else { 0 })
        }
        Kind::Gather => (0, (shards - 1) * elements * size),
        Kind::ReduceScatter => (1, (shards - 1) * (elements / shards) * size),
        Kind::AllReduce => {
            // The contributions to its own slice, and the finished sums of all others.
            let at = mesh.coordinate(rank).replicate_index as u64;
            let own = elements / replicas + u64::from(at < elements % replicas);
            (2, (replicas - 1) * own * size + (elements - own) * 4)
        }
        Kind::Statistics => {
            let world = mesh.world_size() as u64;
            let own = elements / world + u64::from((rank.index() as u64) < elements % world);
            (3, (world - 1) * own * size + (elements - own) * size)
        }
        Kind::ScatterSums | Kind::GatherSlices => {
            let unit = call.unit.expect("of a unit");
            let own = plan.slice(unit, rank).len() as u64;
            match call.kind {
                Kind::ScatterSums => (4, (replicas - 1) * own * size),
                _ => (5, (elements - own) * size),
            }
        }
        Kind::Exchange(_) => return None,
    })
}
