use std::collections::BTreeSet;
use std::sync::Arc;

use hsdp_flight::Stage;
use hsdp_sharding::{
    Accumulation, Mesh, ModelSpec, Param, Plan, PlanOptions, Rank, StateOver, Unit,
};
use proptest::prelude::*;

use super::*;
use crate::host::{Action, Microbatches, Reference};

const UNITS: u64 = 3;

/// Times of a gather, of a reduce-scatter, of an all-reduce or a reduce-scatter of sums, of a
/// gather of slices, and of computation on a unit in each direction.
#[derive(Clone, Copy, Debug, Default)]
struct Given {
    gather: u64,
    reduce: u64,
    all_reduce: u64,
    slices: u64,
    computation: u64,
    launch: u64,
    placement: Option<ModelPlacement>,
    /// Ranks of a machine; gathers between machines take twice as long.
    machine: usize,
}

impl Costs for Given {
    fn shape(&self, members: Members, rank: Rank) -> usize {
        match (members, self.machine) {
            (Members::Shard, 1..) => rank.index() / self.machine % 2,
            _ => 0,
        }
    }

    fn operation(&self, operation: &StepOperation, shape: usize) -> OperationCost {
        let link = match operation.stage {
            Stage::Gather => self.gather * (1 + shape as u64),
            Stage::Reduce => self.reduce,
            Stage::AllReduce | Stage::ScatterSums => self.all_reduce,
            Stage::GatherSlices => self.slices,
            _ => 0,
        };
        let link = Time::from_picoseconds(link);
        OperationCost { host: Time::ZERO, link, busy: [link, Time::ZERO] }
    }

    fn work(&self, work: Work) -> WorkCost {
        let [launch, time] = [self.launch, self.computation].map(Time::from_picoseconds);
        match (work, self.placement) {
            (Work::Forward(_) | Work::Backward(_), Some(ModelPlacement::Device)) => {
                WorkCost { host: launch, device: time }
            }
            (Work::Forward(_) | Work::Backward(_), _) => {
                WorkCost { host: time, device: Time::ZERO }
            }
            _ => WorkCost::default(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    mesh: [usize; 2],
    accumulation: Accumulation,
    prefetch: usize,
    microbatches: Microbatches,
    state: StateOver,
}

const ONCE: Case = Case {
    mesh: [1, 2],
    accumulation: Accumulation::ReduceScatter,
    prefetch: 1,
    microbatches: Microbatches::Given(1),
    state: StateOver::Shards,
};

fn order(case: Case, placement: ModelPlacement) -> Order {
    let unit = |index| Unit::new(format!("u{index}")).param(Param::new(format!("w{index}"), [12]));
    let spec = (0..UNITS).fold(ModelSpec::new(), |spec, index| spec.unit(unit(index)));
    let mesh = Mesh::new(case.mesh[0], case.mesh[1]).expect("a mesh");
    let Case { accumulation, prefetch, state, .. } = case;
    let options = PlanOptions { accumulation, prefetch, state, ..PlanOptions::default() };
    let plan = Arc::new(Plan::new(spec, mesh, options).expect("a plan"));
    Order::of(&plan, case.microbatches, placement)
}

fn total(shares: &Shares) -> Time {
    Share::ALL.into_iter().fold(Time::ZERO, |sum, share| sum + shares.of(share))
}

fn step(case: Case, given: Given) -> u64 {
    let placement = given.placement.unwrap_or(ModelPlacement::Host);
    let timing = simulate(&order(case, placement), &given).expect("it ends");
    for rank in &timing.ranks {
        assert_eq!(total(&rank.shares), rank.step, "{case:?}, {given:?}: {:?}", rank.shares);
    }
    timing.step.picoseconds()
}

const PLACEMENTS: [ModelPlacement; 2] = [ModelPlacement::Host, ModelPlacement::Device];

/// The formulas of docs/performance.md, "Overlap".
#[test]
fn gathers_beside_computation() {
    for placement in PLACEMENTS.map(Some) {
        let given =
            |gather, computation| Given { gather, computation, placement, ..Given::default() };
        let ahead = |prefetch, costs| step(Case { prefetch, ..ONCE }, costs);
        assert_eq!(ahead(0, given(5, 7)), 2 * UNITS * (5 + 7), "{placement:?}");
        for prefetch in [1, 2] {
            assert_eq!(ahead(prefetch, given(5, 7)), 5 + 2 * UNITS * 7, "{placement:?}");
            assert_eq!(ahead(prefetch, given(9, 7)), 2 * UNITS * 9 + 7, "{placement:?}");
        }
    }
}

#[test]
fn reductions_beside_computation() {
    for placement in PLACEMENTS.map(Some) {
        let given = Given { reduce: 4, computation: 7, placement, ..Given::default() };
        assert_eq!(step(ONCE, given), 2 * UNITS * 7 + 4, "{placement:?}");
        let slow = Given { reduce: 9, ..given };
        // The first reduction begins when the first backward ends.
        assert_eq!(step(ONCE, slow), UNITS * 7 + 7 + UNITS * 9, "{placement:?}");
    }
}

#[test]
fn all_reduces_are_deferred_to_the_last_microbatch() {
    let case = Case { mesh: [2, 1], microbatches: Microbatches::Given(4), ..ONCE };
    let asked = Case { microbatches: Microbatches::Asked(4), ..case };
    for placement in PLACEMENTS.map(Some) {
        let given = Given { all_reduce: 100, computation: 7, placement, ..Given::default() };
        let microbatches = 4 * 2 * UNITS * 7;
        // On a device the all-reduce of a unit follows the reduce-scatter of the next.
        let early = if placement == Some(ModelPlacement::Host) { 2 * 7 } else { 7 };
        assert_eq!(step(case, given), microbatches + UNITS * 100 - early, "{placement:?}");
        assert_eq!(step(asked, given), microbatches + UNITS * 100);
        let every = Case { accumulation: Accumulation::Every, ..case };
        assert_eq!(step(every, given), microbatches + 4 * UNITS * 100);
        let local = Case { accumulation: Accumulation::Local, ..case };
        assert_eq!(step(local, given), step(case, given));
    }
}

/// Gathers of slices are under way in the first forward, whose units wait for their own. So they are
/// on a device, where each is issued with the gather of its unit, which is issued ahead.
#[test]
fn gathers_of_slices_beside_the_first_forward() {
    let of = |placement, slices, microbatches| {
        let state = StateOver::World;
        let case = Case { mesh: [2, 1], state, microbatches, ..ONCE };
        step(case, Given { slices, computation: 7, placement: Some(placement), ..Given::default() })
    };
    for (placement, count) in PLACEMENTS.iter().flat_map(|it| [1, 2, 5].map(|count| (*it, count))) {
        for microbatches in [Microbatches::Given(count), Microbatches::Asked(count)] {
            let computed = count * 2 * UNITS * 7;
            let step = |slices| of(placement, slices, microbatches);
            assert_eq!(step(0), computed, "{placement:?}");
            assert_eq!(step(5), 5 + computed, "{placement:?}, {microbatches:?}");
            let exposed = UNITS * 9 - (UNITS - 1) * 7;
            assert_eq!(step(9), exposed + computed, "{placement:?}, {microbatches:?}");
        }
    }
}

/// Where replicas divide state, a reduce-scatter of sums begins where an all-reduce would.
#[test]
fn sums_are_scattered_as_they_are_all_reduced() {
    for (placement, accumulation) in
        PLACEMENTS.into_iter().flat_map(|it| Accumulation::ALL.map(|mode| (it, mode)))
    {
        for microbatches in [Microbatches::Given(3), Microbatches::Asked(3)] {
            let case = Case { mesh: [2, 2], accumulation, microbatches, ..ONCE };
            let placement = Some(placement);
            let given =
                Given { reduce: 5, all_reduce: 11, computation: 7, placement, ..Given::default() };
            let [shards, world] = StateOver::ALL.map(|state| step(Case { state, ..case }, given));
            assert_eq!(shards, world, "{accumulation}, {placement:?}, {microbatches:?}");
        }
    }
}

#[test]
fn a_step_ends_after_the_reductions_of_its_last_microbatch() {
    for placement in PLACEMENTS.map(Some) {
        let given = Given { reduce: 100, computation: 7, placement, ..Given::default() };
        for microbatches in [Microbatches::Given(1), Microbatches::Asked(1)] {
            let case = Case { microbatches, ..ONCE };
            assert_eq!(step(case, given), UNITS * 7 + 7 + UNITS * 100, "{case:?}, {placement:?}");
        }
    }
}

#[test]
fn a_host_that_launches_slowly_holds_the_device_up() {
    let placement = Some(ModelPlacement::Device);
    let given = Given { computation: 7, launch: 10, placement, ..Given::default() };
    assert_eq!(step(ONCE, given), 2 * UNITS * 10);
    let fast = Given { launch: 3, ..given };
    assert_eq!(step(ONCE, fast), 2 * UNITS * 7);
}

#[test]
fn ranks_of_slow_groups_are_waited_for() {
    // Every other shard group straddles machines; all meet in all-reduces.
    let case = Case { mesh: [2, 2], prefetch: 0, ..ONCE };
    let given = Given { gather: 5, computation: 7, machine: 2, ..Given::default() };
    let timing = simulate(&order(case, ModelPlacement::Host), &given).expect("it ends");
    assert_eq!(timing.ranks.len(), 2, "a color for each replica");
    assert_eq!(timing.step.picoseconds(), 2 * UNITS * (10 + 7));
    let [fast, slow] = [0, 1].map(|color| timing.ranks[color].shares);
    assert_eq!(slow.of(Share::Waiting), Time::ZERO);
    assert!(fast.of(Share::Waiting) > Time::ZERO);
}

#[test]
fn an_order_that_waits_before_it_issues_is_refused() {
    for placement in PLACEMENTS {
        let mut order = order(ONCE, placement);
        let block = order.blocks.last_mut().expect("the finish");
        block.actions.insert(0, Action::Need(Reference::Here(0)));
        assert_eq!(simulate(&order, &Given::default()), Err(Error::Stuck), "{placement:?}");
    }
}

/// The time of each share that the spans of a rank's computation show. Waiting for the host is a
/// gap between them.
fn shown<'a>(spans: impl Iterator<Item = &'a Span>) -> [Time; Share::ALL.len()] {
    let mut shown = [Time::ZERO; Share::ALL.len()];
    for span in spans {
        let share = match span.what {
            What::Work(work) | What::Launch(work) => Share::of_work(work),
            What::Operation(it) | What::Issue(it) | What::Wait(it) => Share::of(it.stage),
        };
        shown[Share::Waiting as usize] += span.late;
        shown[share as usize] += span.ends.saturating_sub(span.begins + span.late);
    }
    shown
}

proptest! {
    /// Skipping equal microbatches changes nothing, and neither does the order in which colors are
    /// evaluated. The spans of a thread or stream do not overlap, and those of a rank's computation
    /// add up to its shares.
    #[test]
    fn a_trace_has_the_same_times(
        gather in 0..20u64, reduce in 0..20u64, all_reduce in 0..50u64, slices in 0..50u64,
        computation in 0..20u64, launch in 0..20u64,
        prefetch in 0..4usize, count in 1..40u64, mode in 0..3usize,
        replicas in 1..4usize, shards in 1..7usize,
        on_device: bool, asked: bool, state in 0..2usize, machine in 0..9usize,
    ) {
        let placement = PLACEMENTS[usize::from(on_device)];
        let given = Given {
            gather,
            reduce,
            all_reduce,
            slices,
            computation,
            launch,
            placement: Some(placement),
            machine,
        };
        let microbatches = match asked {
            true => Microbatches::Asked(count),
            false => Microbatches::Given(count),
        };
        let case = Case {
            mesh: [replicas, shards],
            accumulation: Accumulation::ALL[mode],
            prefetch,
            microbatches,
            state: StateOver::ALL[state],
        };
        let order = order(case, placement);
        let timing = simulate(&order, &given).expect("it ends");
        let (traced, spans) = trace(&order, &given).expect("it ends");
        prop_assert_eq!(&timing, &traced);
        for rank in &timing.ranks {
            prop_assert_eq!(total(&rank.shares), rank.step);
        }
        for lane in spans.iter().map(|span| (span.color, span.lane)).collect::<BTreeSet<_>>() {
            let of_lane = spans.iter().filter(|it| (it.color, it.lane) == lane);
            let mut of_lane: Vec<_> = of_lane.collect();
            of_lane.sort_by_key(|span| (span.begins, span.ends));
            let is_in_order = of_lane.windows(2).all(|pair| pair[0].ends <= pair[1].begins);
            prop_assert!(is_in_order, "{:?}", lane);
        }
        for (color, rank) in timing.ranks.iter().enumerate() {
            let lane = if on_device { Lane::Computation } else { Lane::Host };
            let of_lane = spans.iter().filter(|span| (span.color, span.lane) == (color, lane));
            prop_assert_eq!(shown(of_lane), Share::ALL.map(|share| match share {
                Share::Host => Time::ZERO,
                share => rank.shares.of(share),
            }));
        }
    }
}
