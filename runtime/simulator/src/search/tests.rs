//! The bounds of a search beside the work that it does.

use std::num::NonZeroUsize;
use std::sync::Arc;

use hsdp_sharding::{ByteCount, DType, Mesh, ModelSpec, Offload, Param, State, Unit};

use super::candidates::FittingCandidates;
use super::space::{MOST_CANDIDATES, MOST_PLANNED, SLICES_FOR_ONE};
use super::{BUDGET, FOR_FASTEST, OF_PLAN, Search, Searching, Space};
use crate::simulation::actions_done;
use crate::{Computation, Error, GptShape, Hints, Machine, is_lookup};

const RANKS: usize = 4;
const CONTEXT: usize = 64;

/// A model on machines of two cards.
struct Case {
    spec: ModelSpec,
    computation: Arc<Computation>,
    machine: Machine,
}

impl Case {
    fn of_layers(layers: usize) -> Self {
        let gpt = GptShape { width: 64, heads: 4, layers, context: CONTEXT, vocabulary: 500 };
        let spec = gpt.spec().updated_by(|_| State::Elements(2));
        Self::new(spec, gpt.computation().expect("a GPT"))
    }

    /// A unit with parameters, nine things in all.
    fn of_nine() -> Self {
        let param = |slot| Param::new(format!("p{slot}"), [8, 8]);
        let unit = (0..8).fold(Unit::new("unit"), |unit, slot| unit.param(param(slot)));
        let spec = ModelSpec::new().unit(unit);
        let hints = Hints { lookup: &is_lookup, attention: &|_| None };
        let computation = Computation::of(&spec, &hints).expect("a computation");
        Self::new(spec, computation)
    }

    fn new(spec: ModelSpec, computation: Computation) -> Self {
        let mut machine = Machine::bundled("a100-cluster").expect("bundled");
        machine.set("ranks", 2.0, "a test").expect("possible");
        Self { spec, computation: Arc::new(computation), machine }
    }

    fn space(&self) -> Space<'_> {
        Space {
            spec: &self.spec,
            computation: &self.computation,
            machine: &self.machine,
            ranks: RANKS,
            context: CONTEXT,
            memory: ByteCount(1 << 30),
            batch_tokens: Some((4 * RANKS * CONTEXT) as u64),
            offloads: &[Offload::None],
        }
    }
}

fn top(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("above 0")
}

/// The largest space that each limit allows, and the next one.
#[test]
fn a_space_at_its_limit_is_searched_and_the_next_is_refused() {
    let case = Case::of_nine();
    let space = case.space();
    // Three ways to recompute each batch; and no batch, so that plans are all.
    let most = usize::try_from(MOST_CANDIDATES / 3).expect("a size");
    assert_eq!(space.check(&[], 1, &vec![(1, 1); most]), Ok(()));
    let problem = |result: Result<(), Error>| result.expect_err("refused").to_string();
    assert_eq!(
        problem(space.check(&[], 1, &vec![(1, 1); most + 1])),
        "2097153 candidates: 1 plans of 4 ranks, 1 parts that may be offloaded, and 2097153 ways \
         to compute the tokens of a step; at most 2097152 are searched"
    );
    let most = usize::try_from(MOST_PLANNED / 9).expect("a size");
    assert_eq!(space.check(&[], most, &[]), Ok(()));
    assert_eq!(
        problem(space.check(&[], most + 1, &[])),
        "45000009 units and parameters: 5000001 plans of 4 ranks, and 0 ways to compute the tokens \
         of a step, of a model with 9, and 0 slices, 3 for one; at most 45000000 are searched"
    );
    // In each of two dtypes, a unit of eight parameters has 33 slices that differ in a replica.
    let meshes = [Mesh::new(1, 100), Mesh::new(2, 16), Mesh::new(7, 100)];
    let meshes = meshes.map(|mesh| mesh.expect("a mesh"));
    let slices = 2 * (2 * 16 + 7 * 33);
    assert_eq!(space.check(&meshes, most - slices / 3 / 9 - 1, &[]), Ok(()));
    assert_eq!(
        problem(space.check(&meshes, most, &[])),
        "45000175 units and parameters: 5000000 plans of 4 ranks, and 0 ways to compute the tokens \
         of a step, of a model with 9, and 526 slices, 3 for one; at most 45000000 are searched"
    );
}

/// The numbers that are compared with the limits are those of candidates, plans and computations
/// that are made.
#[test]
fn the_estimate_of_a_space_is_the_work_that_is_done() {
    for layers in [2, 20] {
        let case = Case::of_layers(layers);
        for offloads in [&[Offload::None][..], &[Offload::None, Offload::All]] {
            let space = Space { offloads, ..case.space() };
            let fitting = FittingCandidates::of(&space).expect("a space");
            let size = (case.spec.units().len() + case.spec.params().count()) as u64;
            let plans = fitting.choices.len();
            let loads = fitting.loads.len();
            let meshes = space.meshes().expect("meshes");
            let estimate = space.estimate(&meshes, plans, &space.batches().expect("batches"));
            assert_eq!(estimate.candidates, fitting.candidates);
            let planned = (plans + loads) as u64 * size;
            let slices = slices(&case.spec, fitting.divided.keys());
            assert_eq!(estimate.planned, planned + slices / SLICES_FOR_ONE);
        }
    }
}

/// Returns the number of slices of units that may differ in these plans.
fn slices<'a>(spec: &ModelSpec, plans: impl Iterator<Item = &'a (Mesh, DType)>) -> u64 {
    let of_plan = |(mesh, _): &(Mesh, DType)| {
        let runs = spec.units().iter().map(|unit| mesh.shard_size().min(4 * unit.params.len() + 1));
        mesh.replicate_size() * runs.sum::<usize>()
    };
    plans.map(of_plan).sum::<usize>() as u64
}

/// The budget pays for a simulation in proportion to its actions, whatever the number of units and
/// of kinds of ranks.
#[test]
fn a_simulation_costs_the_budget_what_it_does() {
    let mut of_each = Vec::new();
    for (layers, cards) in [(2, 2.0), (20, 2.0), (100, 2.0), (20, 3.0), (100, 3.0)] {
        let mut case = Case::of_layers(layers);
        case.machine.set("ranks", cards, "a test").expect("possible");
        let space =
            Space { ranks: 24, batch_tokens: Some(24 * 4 * CONTEXT as u64), ..case.space() };
        let fitting = FittingCandidates::of(&space).expect("a space");
        let mut searching = Searching::new(&fitting, BUDGET);
        let before = actions_done();
        for index in searching.by_bound.clone().into_iter().step_by(97) {
            searching.speed(index, 1.0).expect("a speed");
        }
        let (simulated, over) = searching.counts();
        assert!(simulated > 10 && over == 0, "{simulated}, {over}");
        let units = case.spec.units().len() as u64;
        // The part of plans does not depend on the kinds of ranks.
        let of_kinds = searching.spent - simulated * OF_PLAN * units;
        of_each.push((actions_done() - before) as f64 / of_kinds as f64);
    }
    let least = of_each.iter().copied().fold(f64::INFINITY, f64::min);
    let most = of_each.iter().copied().fold(0.0, f64::max);
    assert!(most < 2.0 * least && most < 60.0, "{of_each:?}");
}

/// The fastest may use half of the budget, and all simulations together no more than the budget.
#[test]
fn a_search_stays_within_its_budget() {
    let case = Case::of_layers(20);
    let space = case.space();
    let all = Search::of(&space, top(10)).expect("a search");
    assert_eq!(all.over_budget, 0);
    let fitting = FittingCandidates::of(&space).expect("a space");
    let each = {
        let mut searching = Searching::new(&fitting, BUDGET);
        searching.speed(0, 1.0).expect("a speed");
        searching.spent
    };
    let budget = 8 * each;
    let mut searching = Searching::new(&fitting, budget);
    searching.find_fastest().expect("a fastest");
    assert!(searching.spent as f64 <= budget as f64 * FOR_FASTEST, "{}", searching.spent);
    searching.list(top(10)).expect("a list");
    searching.cells().expect("cells");
    assert!(searching.spent <= budget, "{} of {budget}", searching.spent);
    let (simulated, over) = searching.counts();
    assert!(simulated > 0 && over > 0, "{simulated}, {over}");
}

/// Candidates fit, but no simulation is left for the list.
#[test]
fn a_list_that_is_empty_for_want_of_budget_says_so() {
    let case = Case::of_layers(2);
    let space = case.space();
    let fits = FittingCandidates::of(&space).expect("a space").fits.len();
    let error = Search::within(&space, top(10), 1).expect_err("no budget").to_string();
    assert_eq!(
        error,
        format!(
            "{fits} candidates fit, and a search has no time to simulate {fits} of them, so it \
             cannot list any: simulations take at most 1 units, each counted for each kind of \
             ranks; search fewer ranks, or a smaller model"
        )
    );
    // Memory for no candidate is no want of budget.
    let none = Space { memory: ByteCount(1), ..space };
    let none = Search::within(&none, top(10), 1).expect("a search");
    assert!(none.best.is_empty() && none.over_budget == 0);
}
