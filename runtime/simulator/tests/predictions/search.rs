//! The search beside all of its candidates, and its bounds.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use hsdp_sharding::{
    Accumulation, ByteCount, DType, Mesh, ModelSpec, Offload, Param, Plan, PlanOptions, State,
    StateOver, Unit,
};
use hsdp_simulator::{
    Batch, Computation, Error, GptShape, Hints, Machine, Microbatches, Recompute, Search, Space,
    StatedError, Workload, is_lookup,
};

const RANKS: usize = 4;
const CONTEXT: usize = 256;
const TOKENS: u64 = 4 * RANKS as u64 * CONTEXT as u64;
const GPT: GptShape =
    GptShape { width: 256, heads: 8, layers: 3, context: CONTEXT, vocabulary: 5000 };

fn top(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("above 0")
}

/// A model on machines of two cards.
struct Case {
    spec: ModelSpec,
    computation: Arc<Computation>,
    machine: Machine,
}

impl Case {
    fn new(machine: &str) -> Self {
        let mut machine = Machine::bundled(machine).expect("bundled");
        machine.set("ranks", 2.0, "a test").expect("possible");
        let spec = GPT.spec().updated_by(|_| State::Elements(2));
        Self { spec, computation: Arc::new(GPT.computation().expect("a GPT")), machine }
    }

    fn space(&self) -> Space<'_> {
        Space {
            spec: &self.spec,
            computation: &self.computation,
            machine: &self.machine,
            ranks: RANKS,
            context: CONTEXT,
            memory: ByteCount(200 << 20),
            batch_tokens: Some(TOKENS),
            offloads: if self.machine.device().is_some() {
                &[Offload::None, Offload::All]
            } else {
                &[Offload::None]
            },
        }
    }

    /// Tokens a second and bytes of each candidate that fits, by its mesh; found by trying all,
    /// without the search.
    fn all(&self) -> Vec<(Mesh, f64, u64)> {
        let space = self.space();
        let half = DType::BF16;
        let dtypes = match self.machine.device() {
            Some(_) => vec![[half, half], [half, DType::F32], [DType::F32; 2]],
            None => vec![[DType::F32; 2], [DType::F32, half]],
        };
        let mut all = Vec::new();
        for (replicas, dtypes) in
            [1, 2, 4].into_iter().flat_map(|it| dtypes.iter().map(move |d| (it, *d)))
        {
            let mesh = Mesh::new(replicas, RANKS / replicas).expect("a mesh");
            let [param_dtype, reduce_dtype] = dtypes;
            let states = if replicas > 1 { &StateOver::ALL[..] } else { &[StateOver::Shards] };
            let modes = Accumulation::ALL.into_iter().flat_map(|mode| {
                [0, 1, 2, 4]
                    .into_iter()
                    .flat_map(move |ahead| states.iter().map(move |state| (mode, ahead, *state)))
            });
            for (accumulation, prefetch, state) in modes {
                let options = PlanOptions {
                    param_dtype,
                    reduce_dtype,
                    accumulation,
                    prefetch,
                    state,
                    ..PlanOptions::default()
                };
                for spec in [self.spec.clone(), self.spec.clone().all_kept()] {
                    let plan = Arc::new(Plan::new(spec, mesh, options).expect("a plan"));
                    for (sequences, microbatches) in [(4, 1), (2, 2), (1, 4)] {
                        for (recompute, offload) in Recompute::ALL
                            .into_iter()
                            .flat_map(|it| space.offloads.iter().map(move |off| (it, *off)))
                        {
                            let workload = Workload {
                                plan: Arc::clone(&plan),
                                computation: Arc::clone(&self.computation),
                                batch: Batch {
                                    sequences,
                                    context: CONTEXT,
                                    dtype: param_dtype,
                                    recompute,
                                },
                                microbatches: Microbatches::Given(microbatches),
                                offload,
                            };
                            let prediction = workload.predict(&self.machine).expect("a time");
                            if prediction.memory.total() <= space.memory {
                                let bytes = prediction.memory.everywhere().get();
                                all.push((mesh, prediction.tokens_per_second(), bytes));
                            }
                        }
                    }
                }
            }
        }
        all
    }
}

/// On cards and on cores: the fastest is that of all candidates, and the list is that of their
/// definition.
#[test]
fn the_list_is_that_of_all_candidates() {
    for machine in ["a100-cluster", "two-core-cpu"] {
        let case = Case::new(machine);
        let search = Search::of(&case.space(), top(1000)).expect("a search");
        let all = case.all();
        assert_eq!(search.candidates - search.unfit.values().sum::<u64>(), all.len() as u64);
        assert!(search.unfit.values().sum::<u64>() > 0, "not all fit");
        let fastest = all.iter().map(|(_, speed, _)| *speed).fold(0.0, f64::max);
        assert_eq!(search.fastest, fastest, "{machine}");
        // The list has, for each mesh and band, the least memory, unless a better band has as
        // little.
        let mut expected = Vec::new();
        for mesh in [[1, 4], [2, 2], [4, 1]].map(|[r, s]| Mesh::new(r, s).expect("a mesh")) {
            let mut least = u64::MAX;
            for band in 0..10 {
                let on_mesh =
                    all.iter().filter(|(at, speed, _)| *at == mesh && *speed >= fastest / 2.0);
                let in_band =
                    on_mesh.filter(|(_, speed, _)| search.error.band(*speed, fastest) == band);
                if let Some(bytes) =
                    in_band.map(|(.., bytes)| *bytes).min().filter(|it| *it < least)
                {
                    least = bytes;
                    expected.push((band, bytes));
                }
            }
        }
        expected.sort_unstable();
        let bytes = |it: &hsdp_simulator::Found| it.prediction.memory.everywhere().get();
        let found: Vec<_> = search.best.iter().map(|it| (it.band, bytes(it))).collect();
        assert_eq!(found, expected, "{machine}");
        assert_eq!(search.best[0].band, 0);
        assert!(search.simulated < all.len() as u64 / 2, "{} of {}", search.simulated, all.len());
        assert_eq!(search.over_budget, 0);
        for found in &search.best {
            let again = found.workload.predict(&case.machine).expect("a time");
            assert_eq!(again, found.prediction);
            let is_world = found.candidate.to_string().ends_with(" --state-over world");
            assert_eq!(is_world, found.workload.plan.divides_state(), "{}", found.candidate);
        }
    }
}

/// A shorter list is the beginning of a longer one, and two searches find the same.
#[test]
fn the_list_does_not_depend_on_its_length() {
    let case = Case::new("a100-cluster");
    let list = |count| {
        let search = Search::of(&case.space(), top(count)).expect("a search");
        search.best.iter().map(|it| it.candidate).collect::<Vec<_>>()
    };
    let all = list(1000);
    assert!(all.len() > 2, "{}", all.len());
    assert_eq!(list(1000), all);
    (1..=all.len()).for_each(|count| assert_eq!(list(count), all[..count]));
}

#[test]
fn bands_are_an_order() {
    let error = StatedError::NODE;
    let bands: Vec<u32> = (0..400).map(|it| error.band(1.0 - f64::from(it) / 400.0, 1.0)).collect();
    assert!(bands.is_sorted() && bands[0] == 0, "{bands:?}");
    assert_eq!([error.band(0.95, 1.0), error.band(0.94, 1.0)], [0, 1]);
    assert_eq!(error.band(0.0, 1.0), 1000);
}

/// The page has the errors in the table of results, which is beside measurements, and in that of
/// ties.
#[test]
fn stated_errors_are_those_of_the_page() {
    let page = include_str!("../../../../docs/simulator.md");
    for (error, measured) in [
        (StatedError::NODE, "| GPTs on a node of A100, published |"),
        (StatedError::CORES, "| the example's GPT on two cores |"),
        (StatedError::OTHERS, "| up to four machines of 4 A100, published |"),
    ] {
        let number = format!(" {:.1} % |", 100.0 * error.relative);
        let row = page.lines().find(|it| it.starts_with(measured)).expect(measured);
        assert!(row.ends_with(&number), "{row}: {number}");
        let row = format!("| {} |{number}", error.of);
        assert!(page.contains(&row), "{row}");
    }
}

#[test]
fn the_error_depends_on_the_fit_and_on_the_ranks() {
    let of = |name, ranks| Machine::bundled(name).expect("bundled").stated_error(ranks);
    assert_eq!(of("a100-node", 8), StatedError::NODE);
    assert_eq!(
        [of("a100-cluster", 8), of("a100-cluster", 9)],
        [StatedError::NODE, StatedError::OTHERS]
    );
    assert_eq!([of("h100-cluster", 8), of("two-core-cpu", 2)], [StatedError::OTHERS; 2]);
    let mut cores = Machine::bundled("two-core-cpu").expect("bundled");
    for name in ["memory.efficiency", "compute.efficiency"] {
        cores.set(name, 0.5, "fitted to 14 rows of steps.csv").expect("possible");
    }
    assert_eq!(cores.stated_error(4), StatedError::CORES);
    let number = |source| {
        Machine::bundled("a100-node").and_then(|mut node| {
            node.set("compute.half", 1e9, source).map(|()| node.stated_error(8))
        })
    };
    assert_eq!(number("fitted to 12 rows of steps.csv"), Ok(StatedError::NODE));
    for source in ["not fitted to steps", "an estimate, to be fitted to steps", "Fitted to steps"] {
        assert_eq!(number(source), Ok(StatedError::OTHERS), "{source}");
    }
}

/// What would take too long is refused before it begins.
#[test]
fn large_searches_are_refused_with_the_number() {
    let began = Instant::now();
    let case = Case::new("h100-cluster");
    // A highly composite number of sequences.
    let space = Space {
        ranks: 15_120,
        batch_tokens: Some(15_120 * CONTEXT as u64 * 735_134_400),
        ..case.space()
    };
    let error = Search::of(&space, top(1)).expect_err("refused");
    assert!(matches!(error, Error::SearchTooLarge { .. }), "{error}");
    assert!(error.to_string().ends_with("; at most 2097152 are searched"), "{error}");
    let unit = |index: usize| {
        let param = |slot| Param::new(format!("u{index}.{slot}"), [8, 8]);
        (0..8).fold(Unit::new(format!("u{index}")), |unit, slot| unit.param(param(slot)))
    };
    let spec = (0..10_000).fold(ModelSpec::new(), |spec, index| spec.unit(unit(index)));
    let hints = Hints { lookup: &is_lookup, attention: &|_| None };
    let computation = Arc::new(Computation::of(&spec, &hints).expect("a computation"));
    let space = Space { spec: &spec, computation: &computation, ranks: 16_384, ..case.space() };
    let space = Space { batch_tokens: Some(16_384 * CONTEXT as u64), ..space };
    let error = Search::of(&space, top(1)).expect_err("refused").to_string();
    assert_eq!(
        error,
        "956020000 units and parameters: 2088 plans of 16384 ranks, and 6 ways to compute the \
         tokens of a step, of a model with 90000, and 2302680000 slices, 3 for one; at most \
         45000000 are searched"
    );
    assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
}
