//! The formulas of memory against a ledger of allocations that plays a step.

use std::collections::HashMap;

use hsdp_sharding::{
    Accumulation, AfterForward, ByteCount, DType, FullCopies, MemoryPlan, Mesh, ModelSpec, Offload,
    Param, Phase, Piece, Plan, PlanOptions, Role, State, Unit, UnitId,
};
use proptest::prelude::*;

use crate::generators::{accumulation, cases, full_copies, mesh, model, ordered, stored, wire};

/// Allocations by name, and the peak of their sum.
#[derive(Default)]
struct Ledger {
    live: HashMap<(usize, &'static str), usize>,
    peak: usize,
    /// The peak in each half of the microbatch.
    most: HashMap<&'static str, usize>,
}

impl Ledger {
    fn allocate(&mut self, unit: usize, copy: &'static str, bytes: usize) {
        assert!(self.live.insert((unit, copy), bytes).is_none(), "unit {unit} has its {copy} copy");
        self.peak = self.peak.max(self.live.values().sum());
    }

    fn free(&mut self, unit: usize, copy: &'static str) {
        assert!(self.live.remove(&(unit, copy)).is_some(), "unit {unit} has no {copy} copy");
    }
}

/// Plays the gathers of one microbatch, each use in turn, as a training loop would.
struct Player {
    units: Vec<Unit>,
    /// The units as the forward uses them.
    order: Vec<usize>,
    /// The compute dtype of units without their own.
    compute: DType,
    prefetch: usize,
    issued: usize,
    asked: usize,
    ledger: Ledger,
}

impl Player {
    fn kept(&self, unit: usize) -> bool {
        self.units[unit].after_forward == AfterForward::Keep
    }

    /// Whether the unit is gathered for the backward.
    fn comes_back(&self, unit: usize) -> bool {
        self.units[unit].after_forward == AfterForward::Reshard
    }

    fn bytes(&self, unit: usize) -> usize {
        let unit = &self.units[unit];
        let size = unit.compute_dtype.unwrap_or(self.compute).size_bytes();
        size * unit.params.iter().map(Param::numel).sum::<usize>()
    }

    /// All gathers in order.
    fn queue(&self) -> Vec<(usize, &'static str)> {
        let back = self.order.iter().rev().filter(|unit| self.comes_back(**unit));
        let forward = self.order.iter().map(|unit| (*unit, "forward"));
        forward.chain(back.map(|unit| (*unit, "backward"))).collect()
    }

    fn ask(&mut self, unit: usize, copy: &'static str) {
        let queue = self.queue();
        assert_eq!(queue[self.asked], (unit, copy));
        while self.issued <= self.asked + self.prefetch && self.issued < queue.len() {
            let (unit, copy) = queue[self.issued];
            self.ledger.allocate(unit, copy, self.bytes(unit));
            self.issued += 1;
        }
        self.asked += 1;
        self.note(copy);
    }

    /// Records the bytes that are live in this half.
    fn note(&mut self, half: &'static str) {
        let held: usize = self.ledger.live.values().sum();
        let most = self.ledger.most.entry(half).or_default();
        *most = held.max(*most);
    }

    fn play(mut self) -> Ledger {
        for unit in self.order.clone() {
            self.ask(unit, "forward");
            if !self.kept(unit) {
                self.ledger.free(unit, "forward");
            }
        }
        for unit in self.order.clone().into_iter().rev() {
            self.note("backward");
            if self.kept(unit) {
                self.ledger.free(unit, "forward");
            } else if self.comes_back(unit) {
                self.ask(unit, "backward");
                self.ledger.free(unit, "backward");
            }
        }
        assert!(self.ledger.live.is_empty());
        self.ledger
    }
}

/// Two ranks read one copy of each unit, for three microbatches. One still reads the `slow`-th gather; the other, which holds the
/// copies, runs ahead as far as the gathers allow. Returns the bytes that it holds then.
fn held_for(player: &Player, slow: usize) -> usize {
    let queue = player.queue();
    let issued_by = |asked: usize| {
        let of_microbatch = (asked / queue.len() + 1) * queue.len();
        of_microbatch.min(asked.saturating_add(player.prefetch).saturating_add(1))
    };
    let mut fast = slow;
    while fast + 1 < 3 * queue.len() && fast < issued_by(slow) {
        fast += 1;
    }
    let kept = |index: usize| player.kept(queue[index % queue.len()].0);
    let bytes = |index: usize| player.bytes(queue[index % queue.len()].0);
    // Of the earlier forwards, those of kept units whose backward is still to come: the units that are used before this one.
    let used = |index: usize| player.order.iter().position(|unit| *unit == queue[index].0);
    let before = (0..slow).filter(|&index| kept(index) && used(index) < used(slow));
    before.chain(slow..issued_by(fast)).map(bytes).sum()
}

fn player(plan: &Plan) -> Player {
    let units = plan.spec().units().to_vec();
    let (compute, prefetch) = (plan.options().param_dtype, plan.options().prefetch);
    let order = plan.order().iter().map(|unit| unit.index()).collect();
    Player { units, order, compute, prefetch, issued: 0, asked: 0, ledger: Ledger::default() }
}

fn peak_full(plan: &Plan) -> usize {
    let player = player(plan);
    match plan.options().full_copies {
        FullCopies::PerRank => player.play().peak,
        FullCopies::PerProcess if plan.mesh().world_size() == 1 => player.play().peak,
        FullCopies::PerProcess => {
            let slow = 0..player.queue().len();
            slow.map(|slow| held_for(&player, slow)).max().unwrap_or(0)
        }
    }
}

/// The f32 values that a rank holds, counted parameter by parameter and piece by piece; padding is the
/// rest.
fn counted(plan: &Plan) -> MemoryPlan {
    let options = plan.options();
    let (mut shard, mut trainable, mut grad_full, mut without_master) = (0, 0, 0, 0);
    let mut gather_input = 0;
    for (unit, layout) in plan.spec().units().iter().zip(plan.layouts()) {
        let ranks = layout.shard_size();
        shard += layout.full_len() / ranks;
        if unit.compute_dtype.unwrap_or(options.param_dtype) != DType::F32 {
            gather_input += 2 * (layout.full_len() / ranks);
        }
        if unit.params.iter().any(|param| param.stored.is_some()) {
            without_master += layout.frozen().len / ranks;
        }
        trainable += layout.trainable().len / ranks;
        for param in unit.params.iter().filter(|param| param.role == Role::Trainable) {
            grad_full += param.shape.iter().product::<usize>();
        }
    }
    let replicas = plan.mesh().ranks().len() > plan.mesh().shard_size();
    let every = options.accumulation == Accumulation::Every && replicas;
    let local = options.accumulation == Accumulation::Local;
    let words = |words: usize| ByteCount::of(4 * words);
    MemoryPlan {
        shard: words(shard - without_master),
        gather_input: ByteCount::of(gather_input),
        full: ByteCount::of(peak_full(plan)),
        grad_full: words(if local { grad_full } else { 0 }),
        partial: words(if every { 2 * trainable } else { trainable }),
        optimizer: words(most_state(plan)),
        update: ByteCount::ZERO,
    }
}

/// The most f32 of optimizer state of a rank, whose pieces all have state for each element.
fn most_state(plan: &Plan) -> usize {
    let of_rank = |rank| {
        let of_piece = |(unit, piece): (UnitId, Piece)| {
            let param = &plan.spec()[unit].params[piece.param];
            match (param.role, param.state) {
                (Role::Trainable, State::Elements(slots)) => slots * piece.len.div_ceil(32) * 32,
                _ => 0,
            }
        };
        plan.pieces_of(rank).into_iter().map(of_piece).sum()
    };
    plan.mesh().ranks().map(of_rank).max().expect("a mesh has ranks")
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn the_formulas_are_what_is_counted(
        (spec, order) in ordered(),
        mesh in mesh(),
        param_dtype in wire(),
        accumulation in accumulation(),
        (prefetch, slots) in (0usize..=14, 0usize..=2),
        full_copies in full_copies(),
        units in any::<u8>(),
    ) {
        let options = PlanOptions {
            param_dtype, accumulation, prefetch, full_copies, ..Default::default()
        };
        let spec = stored(&spec, param_dtype, units).updated_by(|_| State::Elements(slots));
        let plan = Plan::new(spec, mesh, options).unwrap().in_order(&order);
        prop_assert_eq!(plan.memory(), counted(&plan));
        let phases = [Phase::Forward, Phase::Backward].map(|phase| plan.full_in(phase));
        prop_assert_eq!(phases.into_iter().max(), Some(plan.memory().full));
        if full_copies == FullCopies::PerRank {
            let most = player(&plan).play().most;
            prop_assert_eq!(phases, ["forward", "backward"].map(|half| ByteCount::of(most[half])));
        }
        let on_device = plan.memory_on_device(Offload::None).full;
        let phases = [Phase::Forward, Phase::Backward].map(|phase| plan.full_in_on_device(phase));
        prop_assert_eq!(phases.into_iter().max(), Some(on_device));
    }
}

/// Computed by hand, for sizes that need no padding.
#[test]
fn what_is_offloaded_moves_from_the_device_to_the_host() {
    let small = Unit::new("small").param(Param::new("a", [64]));
    let large =
        Unit::new("large").param(Param::new("b", [128])).param(Param::new("c", [64]).frozen());
    let spec = ModelSpec::new().unit(small).unit(large);
    let on = |param_dtype| {
        let options = PlanOptions { param_dtype, ..PlanOptions::default() };
        Plan::new(spec.clone(), Mesh::new(1, 2).unwrap(), options).unwrap()
    };
    let bytes = |plan: MemoryPlan| {
        let MemoryPlan { shard, gather_input, optimizer, partial, .. } = plan;
        [shard, gather_input, optimizer, partial].map(ByteCount::get)
    };
    let plan = on(DType::F32);
    // 32 elements, and 64 with 32 frozen ones behind them, a rank.
    let [shard, trained, largest] = [32 + 96, 32 + 64, 96].map(|elements: u64| 4 * elements);
    assert_eq!(bytes(plan.memory_on_device(Offload::None)), [shard, 0, 2 * trained, trained]);
    assert_eq!(bytes(plan.memory_on_device(Offload::Optimizer)), [shard, 0, 0, trained]);
    assert_eq!(bytes(plan.memory_on_device(Offload::All)), [0, shard, 0, trained]);
    assert_eq!(bytes(plan.memory_offloaded(Offload::None)), [0; 4]);
    assert_eq!(bytes(plan.memory_offloaded(Offload::Optimizer)), [largest, 0, 2 * trained, 4 * 64]);
    assert_eq!(bytes(plan.memory_offloaded(Offload::All)), [shard, 0, 2 * trained, 4 * 64]);
    let half = on(DType::BF16);
    assert_eq!(bytes(half.memory_on_device(Offload::Optimizer)), [shard, shard / 2, 0, trained]);
    assert_eq!(bytes(half.memory_on_device(Offload::All)), [0, shard / 2, 0, trained]);
    assert_eq!(
        bytes(half.memory_offloaded(Offload::All)),
        [shard, largest / 2, 2 * trained, 4 * 64]
    );
}

/// As above, where the large unit computes in f32, or in f16, and the model in bf16.
#[test]
fn what_is_offloaded_of_units_in_two_dtypes() {
    let plan = |large_in| {
        let small = Unit::new("small").param(Param::new("a", [64]));
        let large = Unit::new("large").param(Param::new("b", [128])).compute_in(large_in);
        let options = PlanOptions { param_dtype: DType::BF16, ..PlanOptions::default() };
        let spec = ModelSpec::new().unit(small).unit(large);
        Plan::new(spec, Mesh::new(1, 2).unwrap(), options).unwrap()
    };
    let copies = |plan: &Plan, offload| {
        let [device, host] = [plan.memory_on_device(offload), plan.memory_offloaded(offload)];
        [device, host].map(|memory| memory.gather_input.get())
    };
    // 32 and 64 elements a rank. A unit in f32 has no copy, unless its master is on the host.
    let island = plan(DType::F32);
    assert_eq!(copies(&island, Offload::None), [2 * 32, 0]);
    assert_eq!(copies(&island, Offload::All), [2 * 32 + 4 * 64, 2 * 32]);
    let both_halves = plan(DType::F16);
    assert_eq!(copies(&both_halves, Offload::None), [2 * 96, 0]);
    assert_eq!(copies(&both_halves, Offload::All), [2 * 96, 2 * 32 + 2 * 64]);
}

proptest! {
    #![proptest_config(cases(256))]

    /// All ranks together save every element once, each from its own pieces. A snapshot holds these and their optimizer state.
    #[test]
    fn every_element_is_saved_by_one_rank(
        spec in model(),
        mesh in mesh(),
        slots in 0usize..=2,
    ) {
        let spec = spec.updated_by(|_| State::Elements(slots));
        let plan = Plan::new(spec, mesh, PlanOptions::default()).unwrap();
        let mut saved: HashMap<(usize, usize), Vec<u8>> = HashMap::new();
        let (mut copied, mut words) = (ByteCount::ZERO, 0);
        for (unit, spec) in plan.spec().units().iter().enumerate() {
            for (index, param) in spec.params.iter().enumerate() {
                let numel: usize = param.shape.iter().product();
                saved.insert((unit, index), vec![0; numel]);
                let slots = if param.role == Role::Trainable { slots } else { 0 };
                words += numel * (1 + slots);
            }
        }
        for rank in plan.mesh().ranks() {
            let own = plan.pieces_of(rank);
            for (unit, piece) in plan.pieces_saved_by(rank) {
                let is_within = |(of, all): &(UnitId, Piece)| {
                    let (all_of, saved_of) = (all.param_range(), piece.param_range());
                    let same = (*of, all.param) == (unit, piece.param);
                    let shift = piece.shard_start as i64 - piece.param_start as i64;
                    same && all_of.start <= saved_of.start && saved_of.end <= all_of.end
                        && shift == all.shard_start as i64 - all.param_start as i64
                };
                prop_assert!(own.iter().any(is_within));
                let elements = saved.get_mut(&(unit.index(), piece.param)).unwrap();
                elements[piece.param_range()].iter_mut().for_each(|times| *times += 1);
            }
            copied += plan.snapshot(rank);
        }
        prop_assert!(saved.values().flatten().all(|times| *times == 1));
        prop_assert_eq!(copied, ByteCount::of(4 * words));
    }
}

/// Units of these sizes on a single rank, in bf16.
fn full(units: &[(usize, AfterForward)], prefetch: usize) -> u64 {
    let spec = units.iter().enumerate().fold(ModelSpec::new(), |spec, (index, &(len, after))| {
        let mut unit = Unit::new(format!("u{index}")).param(Param::new(format!("p{index}"), [len]));
        unit.after_forward = after;
        spec.unit(unit)
    });
    let options = PlanOptions { param_dtype: DType::BF16, prefetch, ..PlanOptions::default() };
    Plan::new(spec, Mesh::SINGLE, options).expect("small units").memory().full.get()
}

#[test]
fn peaks_of_full_parameters_by_hand() {
    use AfterForward::{Keep, Reshard};
    let equal = [(10, Reshard); 4];
    assert_eq!(full(&equal, 0), 2 * 10);
    assert_eq!(full(&equal, 1), 2 * 20);
    assert_eq!(full(&equal, 7), 2 * 80, "both copies of each unit at once");
    assert_eq!(full(&[(10, Keep); 4], 1), 2 * 40, "kept units add up");
    assert_eq!(full(&[(30, Keep), (10, Reshard), (10, Reshard)], 1), 2 * 50);
    assert_eq!(full(&[(10, Reshard), (10, Reshard), (30, Keep)], 1), 2 * 40);
    assert_eq!(full(&[(10, Reshard)], 1), 2 * 20, "forward and backward copy of the only unit");
}

#[test]
fn a_unit_that_computes_in_f32_counts_twice_as_much() {
    let unit = |name: &str, len| Unit::new(name).param(Param::new(format!("{name}.w"), [len]));
    let spec = ModelSpec::new().unit(unit("a", 30)).unit(unit("b", 20).compute_in(DType::F32));
    let options = PlanOptions { param_dtype: DType::BF16, prefetch: 0, ..PlanOptions::default() };
    let plan = Plan::new(spec, Mesh::SINGLE, options).expect("small units");
    assert_eq!(plan.memory().full, ByteCount(4 * 20), "30 elements of two bytes are fewer");
    assert_eq!(plan.memory().gather_input, ByteCount(2 * 32), "of the first unit alone");
}

#[test]
fn the_largest_prefetch_means_everything() {
    let equal = [(10, AfterForward::Reshard); 4];
    assert_eq!(full(&equal, usize::MAX), full(&equal, 7));
}

#[test]
fn the_total_adds_all_categories() {
    let memory = MemoryPlan {
        shard: ByteCount(1),
        full: ByteCount(10),
        grad_full: ByteCount(100),
        partial: ByteCount(1000),
        optimizer: ByteCount(10_000),
        gather_input: ByteCount(100_000),
        update: ByteCount(1_000_000),
    };
    assert_eq!(memory.total(), ByteCount(1_111_111));
}

/// Another order changes the schedule, and neither the layouts nor the fingerprint.
#[test]
fn a_kept_unit_is_held_from_its_use_on() {
    let units = [("a", 1000), ("b", 100), ("c", 10)];
    let unit = |(name, len)| Unit::new(name).param(Param::new(format!("{name}.w"), [len]));
    let spec = ModelSpec::new().unit(unit(units[0]).keep());
    let spec = spec.unit(unit(units[1])).unit(unit(units[2]));
    let options = PlanOptions { prefetch: 0, ..PlanOptions::default() };
    let declared = Plan::new(spec, Mesh::new(1, 1).unwrap(), options).unwrap();
    let used = declared.in_order(&[1, 2, 0].map(UnitId::new));
    assert_eq!(declared.memory().full, ByteCount(4 * 1100));
    assert_eq!(used.memory().full, ByteCount(4 * 1000));
    assert_eq!(used.fingerprint(), declared.fingerprint());
    assert_ne!(used.order_digest(), declared.order_digest());
}

#[test]
#[should_panic(expected = "is no order of all units")]
fn an_order_has_each_unit_once() {
    let spec = ModelSpec::new().unit(Unit::new("a").param(Param::new("w", [1])));
    let plan = Plan::new(spec, Mesh::new(1, 1).unwrap(), PlanOptions::default()).unwrap();
    let _ = plan.in_order(&[0, 0].map(UnitId::new));
}
