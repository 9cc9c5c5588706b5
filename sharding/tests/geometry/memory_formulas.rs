//! The formulas of memory against a ledger of the allocations in a step, which the machine of the
//! step decides.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use hsdp_sharding::step::{
    Begin, Conclusion, Exchange, Headers, Output, Refused, Rules, StepMachine, Target, UnitOrder,
};
use hsdp_sharding::{
    AfterForward, BufferId, ByteCount, DType, FullCopies, MemoryPlan, Mesh, ModelSpec, Offload,
    Param, Phase, Piece, Plan, PlanOptions, Rank, Role, State, StateOver, Unit, UnitId,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::generators::{
    accumulation, cases, full_copies, mesh, model, ordered, state_over, stored, unit_with_rows,
    wire,
};
use crate::slices;

/// The lengths of a few buffers.
fn buffers() -> impl Strategy<Value = Vec<usize>> {
    vec(1usize..=300, 0..=7)
}

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

/// The rank of a training loop that uses each unit in turn, and drops it. The machine of the step
/// says what it gathers and reduces meanwhile.
struct Player {
    units: Vec<Unit>,
    /// The units as the forward uses them.
    order: Vec<UnitId>,
    /// Compute dtype of units without their own.
    compute: DType,
    machine: StepMachine,
    ranks: usize,
    played: Played,
}

/// The microbatch that was played.
#[derive(Default)]
struct Played {
    ledger: Ledger,
    /// All gathers in order.
    gathers: Vec<(usize, &'static str)>,
    /// Units whose gradients were accumulated unsharded.
    accumulated: BTreeSet<usize>,
    /// Units with a partial, and units with sums of a microbatch apart from it.
    partials: BTreeSet<usize>,
    transients: BTreeSet<usize>,
}

impl Player {
    fn of(plan: &Plan) -> Self {
        let rules = Rules { order: UnitOrder::Error, ..Rules::default() };
        Self {
            units: plan.spec().units().to_vec(),
            order: plan.order().to_vec(),
            compute: plan.options().param_dtype,
            machine: StepMachine::new(Arc::new(plan.clone()), rules),
            ranks: plan.mesh().world_size(),
            played: Played::default(),
        }
    }

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

    fn feed(&mut self, input: impl FnOnce(&mut StepMachine) -> Result<(), Refused>) {
        input(&mut self.machine).expect("the loop keeps to the order of a step");
        while let Some(output) = self.machine.poll() {
            self.carry_out(output);
        }
    }

    fn carry_out(&mut self, output: Output) {
        let played = &mut self.played;
        match output {
            Output::Gather { unit, phase, .. } => {
                let unit = unit.index();
                let copy = name(phase);
                played.gathers.push((unit, copy));
                let bytes = self.bytes(unit);
                self.played.ledger.allocate(unit, copy, bytes);
            }
            Output::Accumulate(unit) => drop(played.accumulated.insert(unit.index())),
            Output::ReduceScatter { unit, into: Target::Microbatch, .. } => {
                played.transients.insert(unit.index());
            }
            Output::ReduceScatter { unit, .. } | Output::Fold(unit) => {
                played.partials.insert(unit.index());
            }
            Output::Await(operation) | Output::Follow(operation) => {
                self.machine.done(operation).expect("the machine waits for it");
            }
            Output::Exchange(exchange) => {
                let conclusion = match exchange {
                    Exchange::Headers => Conclusion::Headers(Headers::of_data(self.ranks)),
                    _ => Conclusion::Agreed,
                };
                self.machine.conclude(conclusion).expect("all ranks say the same");
            }
            Output::Hand { .. }
            | Output::Free { .. }
            | Output::Statistics { .. }
            | Output::AllReduce(_)
            | Output::ScatterSums(_)
            | Output::GatherSlices(_) => {}
        }
    }

    /// Uses a unit, and drops it unless the loop keeps it.
    fn use_of(&mut self, unit: UnitId, phase: Phase) {
        self.feed(|machine| machine.need(unit));
        self.note(name(phase));
        if !self.kept(unit.index()) {
            self.played.ledger.free(unit.index(), name(phase));
        }
    }

    /// Records the bytes that are live in this half.
    fn note(&mut self, half: &'static str) {
        let ledger = &mut self.played.ledger;
        let held: usize = ledger.live.values().sum();
        let most = ledger.most.entry(half).or_default();
        *most = held.max(*most);
    }

    fn play(&mut self) {
        self.feed(|machine| machine.begin(Begin::step(0, Some(1))));
        self.feed(StepMachine::begin_microbatch);
        for unit in self.order.clone() {
            self.use_of(unit, Phase::Forward);
        }
        self.feed(StepMachine::loss);
        for unit in self.order.clone().into_iter().rev() {
            self.note("backward");
            if self.kept(unit.index()) {
                self.played.ledger.free(unit.index(), "forward");
            } else if self.comes_back(unit.index()) {
                self.use_of(unit, Phase::Backward);
            }
            if self.units[unit.index()].is_trainable() {
                self.feed(|machine| machine.offer(unit));
            }
        }
        self.feed(StepMachine::end_microbatch);
        self.feed(StepMachine::finish);
        assert!(self.played.ledger.live.is_empty());
    }
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
    }
}

/// Two ranks read one copy of each unit, for three microbatches. One still reads the `slow`-th
/// gather; the other, which holds the copies, runs ahead as far as the gathers allow. Returns the
/// bytes that it holds then.
fn held_for(player: &Player, prefetch: usize, slow: usize) -> usize {
    let queue = &player.played.gathers;
    let issued_by = |asked: usize| {
        let of_microbatch = (asked / queue.len() + 1) * queue.len();
        of_microbatch.min(asked.saturating_add(prefetch).saturating_add(1))
    };
    let mut fast = slow;
    while fast + 1 < 3 * queue.len() && fast < issued_by(slow) {
        fast += 1;
    }
    let kept = |index: usize| player.kept(queue[index % queue.len()].0);
    let bytes = |index: usize| player.bytes(queue[index % queue.len()].0);
    // The earlier forwards of kept units whose backward is still to come: the units that are used
    // before this one.
    let used = |index: usize| player.order.iter().position(|unit| unit.index() == queue[index].0);
    let before = (0..slow).filter(|&index| kept(index) && used(index) < used(slow));
    before.chain(slow..issued_by(fast)).map(bytes).sum()
}

fn played(plan: &Plan) -> Player {
    let mut player = Player::of(plan);
    player.play();
    player
}

fn peak_full(plan: &Plan, player: &Player) -> usize {
    match plan.options().full_copies {
        FullCopies::PerProcess if plan.mesh().world_size() > 1 => {
            let slow = 0..player.played.gathers.len();
            let held = |slow| held_for(player, plan.options().prefetch, slow);
            slow.map(held).max().unwrap_or(0)
        }
        FullCopies::PerRank | FullCopies::PerProcess => player.played.ledger.peak,
    }
}

/// The f32 values that a rank holds in the step that was played, counted parameter by parameter and
/// piece by piece; padding is the rest.
fn counted(plan: &Plan) -> MemoryPlan {
    let options = plan.options();
    let player = played(plan);
    let mut partial = 0;
    let mut grad_full = 0;
    let mut gather_input = 0;
    for (at, (unit, layout)) in plan.spec().units().iter().zip(plan.layouts()).enumerate() {
        let ranks = layout.shard_size();
        if unit.compute_dtype.unwrap_or(options.param_dtype) != DType::F32 {
            gather_input += 2 * (layout.full_len() / ranks);
        }
        let sums = [&player.played.partials, &player.played.transients];
        let sums = sums.into_iter().filter(|units| units.contains(&at)).count();
        partial += sums * (layout.trainable().len / ranks);
        if player.played.accumulated.contains(&at) {
            let trainable = unit.params.iter().filter(|param| param.role == Role::Trainable);
            grad_full += trainable.map(Param::numel).sum::<usize>();
        }
    }
    let words = |words: usize| ByteCount::of(4 * words);
    MemoryPlan {
        shard: words(masters(plan, Offload::None).into_iter().max().expect("a mesh has ranks")),
        gather_input: ByteCount::of(gather_input),
        full: ByteCount::of(peak_full(plan, &player)),
        grad_full: words(grad_full),
        partial: words(partial),
        optimizer: words(most_state(plan)),
        update: ByteCount::ZERO,
        buffers: words((2 + plan.spec().averages()) * buffer_elements(plan.spec())),
    }
}

/// Returns the f32 masters of each rank, element by element of its shards.
fn masters(plan: &Plan, offload: Offload) -> Vec<usize> {
    let mut masters = vec![0; plan.mesh().world_size()];
    for (id, unit) in plan.spec().unit_ids().zip(plan.spec().units()) {
        let layout = plan.layout(id);
        let trainable = layout.trainable().len / layout.shard_size();
        let compute = unit.compute_dtype.unwrap_or(plan.options().param_dtype);
        let is_gathered = compute == DType::F32 && offload != Offload::All;
        let is_stored = unit.params.iter().any(|param| param.stored.is_some());
        for (masters, updated) in masters.iter_mut().zip(slices::updated(plan, id)) {
            let has_master = |element: &usize| match *element < trainable {
                true => is_gathered || updated.contains(element),
                false => !is_stored,
            };
            *masters += (0..layout.full_len() / layout.shard_size()).filter(has_master).count();
        }
    }
    masters
}

/// Returns the most elements of a shard that a rank updates, and the most that are copied between
/// host and device, in units that are selected.
fn most_updated(plan: &Plan, has: impl Fn(&Unit) -> bool) -> [usize; 2] {
    let mut most = [0; 2];
    for (id, unit) in plan.spec().unit_ids().zip(plan.spec().units()) {
        if has(unit) {
            for updated in slices::updated(plan, id) {
                let whole = plan.layout(id).full_len() / plan.mesh().shard_size();
                let copied = if slices::divided(plan) { updated.len() } else { whole };
                most = [most[0].max(updated.len()), most[1].max(copied)];
            }
        }
    }
    most
}

fn buffer_elements(spec: &ModelSpec) -> usize {
    spec.units().iter().flat_map(|unit| &unit.buffers).map(Param::numel).sum()
}

/// Adds a buffer of each of these lengths to the units in turn, and plans this number of averages.
fn with_buffers(spec: &ModelSpec, lens: &[usize], averages: usize) -> ModelSpec {
    let mut units = spec.units().to_vec();
    for (index, len) in lens.iter().enumerate() {
        let unit = &mut units[index % spec.units().len()];
        *unit = unit.clone().param(Param::new(format!("buffer.{index}"), [*len]).buffer());
    }
    let ties: Vec<(String, String)> =
        spec.ties().map(|(alias, target)| (alias.to_owned(), target.to_owned())).collect();
    let spec = units.into_iter().fold(ModelSpec::new(), ModelSpec::unit);
    let spec = ties.into_iter().fold(spec, |spec, (alias, target)| spec.tie(alias, target));
    (0..averages).fold(spec, |spec, _| spec.averaged())
}

/// The most f32 of optimizer state of a rank, whose pieces all have state for each element.
fn most_state(plan: &Plan) -> usize {
    let updated: Vec<_> = plan.spec().unit_ids().map(|unit| slices::updated(plan, unit)).collect();
    let of_rank = |rank: Rank| {
        let of_piece = |(unit, piece): (UnitId, Piece)| {
            let param = &plan.spec()[unit].params[piece.param];
            let updated = &updated[unit.index()][rank.index()];
            let len = piece.shard_range().filter(|element| updated.contains(element)).count();
            match (param.role, param.state) {
                (Role::Trainable, State::Elements(slots)) => slots * len.div_ceil(32) * 32,
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
        (full_copies, state) in (full_copies(), state_over()),
        units in any::<u8>(),
        buffers in buffers(),
    ) {
        let full_copies = match state {
            StateOver::Shards => full_copies,
            StateOver::World => FullCopies::PerRank,
        };
        let options = PlanOptions {
            param_dtype, accumulation, prefetch, full_copies, state, ..Default::default()
        };
        let spec = with_buffers(&stored(&spec, param_dtype, units), &buffers, 0);
        let spec = spec.updated_by(|_| State::Elements(slots));
        let plan = Plan::new(spec, mesh, options).unwrap().in_order(&order);
        prop_assert_eq!(plan.memory(), counted(&plan));
        let phases = [Phase::Forward, Phase::Backward].map(|phase| plan.full_in(phase));
        prop_assert_eq!(phases.into_iter().max(), Some(plan.memory().full));
        if full_copies == FullCopies::PerRank {
            let most = played(&plan).played.ledger.most;
            prop_assert_eq!(phases, ["forward", "backward"].map(|half| ByteCount::of(most[half])));
        }
        let on_device = plan.memory_on_device(Offload::None).full;
        let phases = [Phase::Forward, Phase::Backward].map(|phase| plan.full_in_on_device(phase));
        prop_assert_eq!(phases.into_iter().max(), Some(on_device));
    }
}

proptest! {
    #![proptest_config(cases(192))]

    /// Masters are those of each rank, and copies those of the largest part of a unit.
    #[test]
    fn masters_and_copies_are_what_is_counted(
        spec in prop_oneof![model(), unit_with_rows().prop_map(|unit| ModelSpec::new().unit(unit))],
        mesh in mesh(),
        (param_dtype, state) in (wire(), state_over()),
        (units, block) in (any::<u8>(), 1usize..=300),
    ) {
        let options = PlanOptions { param_dtype, state, ..Default::default() };
        let spec = spec.updated_by(|_| State::EightBit { block });
        let stored = Plan::new(stored(&spec, param_dtype, units), mesh, options).unwrap();
        let counted = masters(&stored, Offload::None);
        for rank in mesh.ranks() {
            prop_assert_eq!(stored.masters(rank), ByteCount::of(4 * counted[rank.index()]));
        }
        let most = ByteCount::of(4 * counted.into_iter().max().unwrap());
        prop_assert_eq!(stored.memory().shard, most);

        let plan = Plan::new(spec, mesh, options).unwrap();
        let on_device = masters(&plan, Offload::None).into_iter().max().unwrap();
        for offload in [Offload::None, Offload::Optimizer] {
            let shard = plan.memory_on_device(offload).shard;
            prop_assert_eq!(shard, ByteCount::of(4 * on_device));
        }
        prop_assert_eq!(plan.memory_on_device(Offload::All).shard, ByteCount::ZERO);
        let counted = masters(&plan, Offload::All);
        for rank in mesh.ranks() {
            let expected = ByteCount::of(4 * counted[rank.index()]);
            prop_assert_eq!(plan.masters_offloaded(rank), expected);
        }
        let most = ByteCount::of(4 * counted.into_iter().max().unwrap());
        let all = plan.memory_offloaded(Offload::All);
        prop_assert_eq!(all.shard, most);
        let [updated, copied] = most_updated(&plan, Unit::is_trainable);
        let optimizer = plan.memory_offloaded(Offload::Optimizer);
        prop_assert_eq!(optimizer.shard, ByteCount::of(4 * copied));
        let partial = ByteCount::of(4 * updated);
        prop_assert_eq!([optimizer.partial, all.partial], [partial; 2]);
        let rounded = [DType::BF16, DType::F16].map(|dtype| {
            most_updated(&plan, |unit| unit.compute_dtype.unwrap_or(param_dtype) == dtype)[1]
        });
        let rounded: usize = rounded.into_iter().sum();
        prop_assert_eq!(all.gather_input, ByteCount::of(2 * rounded));
        prop_assert_eq!(optimizer.gather_input, ByteCount::ZERO);
    }

    /// A single replica has nothing to divide.
    #[test]
    fn one_replica_has_the_costs_of_state_over_shards(
        (spec, averages) in (model(), 0usize..=2),
        shards in 1usize..=4,
        (param_dtype, accumulation) in (wire(), accumulation()),
    ) {
        let spec = (0..averages).fold(spec, |spec, _| spec.averaged());
        let mesh = Mesh::new(1, shards).unwrap();
        let [over_shards, over_world] = StateOver::ALL.map(|state| {
            let options = PlanOptions { param_dtype, accumulation, state, ..Default::default() };
            Plan::new(spec.clone(), mesh, options).unwrap()
        });
        prop_assert!(!over_world.divides_state());
        prop_assert_eq!(over_world.memory(), over_shards.memory());
        for offload in Offload::EVERY {
            let both = [&over_world, &over_shards];
            let [world, shards] = both.map(|plan| plan.memory_on_device(offload));
            prop_assert_eq!(world, shards);
            let [world, shards] = both.map(|plan| plan.memory_offloaded(offload));
            prop_assert_eq!(world, shards);
        }
        for rank in mesh.ranks() {
            prop_assert_eq!(over_world.traffic(rank, 2), over_shards.traffic(rank, 2));
            prop_assert_eq!(over_world.optimizer_state(rank), over_shards.optimizer_state(rank));
            prop_assert_eq!(over_world.masters(rank), over_shards.masters(rank));
            prop_assert_eq!(over_world.snapshot(rank), over_shards.snapshot(rank));
        }
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

/// As above, where two replicas divide the state: slices of 16 and of 32 elements.
#[test]
fn what_is_offloaded_of_slices() {
    let small = Unit::new("small").param(Param::new("a", [64]));
    let large =
        Unit::new("large").param(Param::new("b", [128])).param(Param::new("c", [64]).frozen());
    let spec = ModelSpec::new().unit(small).unit(large);
    let on = |param_dtype| {
        let options = PlanOptions { param_dtype, state: StateOver::World, ..Default::default() };
        Plan::new(spec.clone(), Mesh::new(2, 2).unwrap(), options).unwrap()
    };
    let bytes = |plan: MemoryPlan| {
        let MemoryPlan { shard, gather_input, optimizer, partial, .. } = plan;
        [shard, gather_input, optimizer, partial].map(ByteCount::get)
    };
    let [whole, trained, masters, largest] = [128, 96, 80, 32].map(|elements: u64| 4 * elements);
    // AdamW pads the slice of 16 elements.
    let state = 2 * 4 * 64;
    let plan = on(DType::F32);
    assert_eq!(bytes(plan.memory()), [whole, 0, state, trained]);
    assert_eq!(bytes(plan.memory_on_device(Offload::Optimizer)), [whole, 0, 0, trained]);
    assert_eq!(bytes(plan.memory_offloaded(Offload::Optimizer)), [largest, 0, state, largest]);
    assert_eq!(bytes(plan.memory_on_device(Offload::All)), [0, whole, 0, trained]);
    assert_eq!(bytes(plan.memory_offloaded(Offload::All)), [masters, 0, state, largest]);
    let half = on(DType::BF16);
    assert_eq!(bytes(half.memory()), [masters, whole / 2, state, trained]);
    assert_eq!(bytes(half.memory_on_device(Offload::None)), [masters, whole / 2, state, trained]);
    assert_eq!(bytes(half.memory_on_device(Offload::All)), [0, whole / 2, 0, trained]);
    assert_eq!(bytes(half.memory_offloaded(Offload::All)), [masters, largest / 2, state, largest]);
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

    /// All ranks together save every element once, each from its own pieces, and every buffer once.
    /// A snapshot holds these, their optimizer state and their averages.
    #[test]
    fn every_element_is_saved_by_one_rank(
        spec in model(),
        mesh in mesh(),
        slots in 0usize..=2,
        buffers in buffers(),
        averages in 0usize..=2,
    ) {
        let spec = with_buffers(&spec, &buffers, averages);
        let spec = spec.updated_by(|_| State::Elements(slots));
        let plan = Plan::new(spec, mesh, PlanOptions::default()).unwrap();
        let mut saved: HashMap<(usize, usize), Vec<u8>> = HashMap::new();
        let mut copied = ByteCount::ZERO;
let mut words = 0;
        for (unit, spec) in plan.spec().units().iter().enumerate() {
            for (index, param) in spec.params.iter().enumerate() {
                let numel: usize = param.shape.iter().product();
                saved.insert((unit, index), vec![0; numel]);
                let kept = if param.role == Role::Trainable { slots + averages } else { 0 };
                words += numel * (1 + kept);
            }
        }
        words += (1 + averages) * buffer_elements(plan.spec());
        let saved_buffers: Vec<usize> =
            plan.mesh().ranks().map(|rank| plan.buffers_saved_by(rank).len()).collect();
        let most = saved_buffers.iter().max();
        let fewest = saved_buffers.iter().min();
        prop_assert!(most <= fewest.map(|it| it + 1).as_ref(), "the ranks take them in turn");
        let mut ids: Vec<BufferId> =
            plan.mesh().ranks().flat_map(|rank| plan.buffers_saved_by(rank)).collect();
        ids.sort_unstable();
        prop_assert!(ids.into_iter().eq(plan.spec().buffers().map(|(id, _)| id)));
        for rank in plan.mesh().ranks() {
            let own = plan.pieces_of(rank);
            for (unit, piece) in plan.pieces_saved_by(rank) {
                let is_within = |(of, all): &(UnitId, Piece)| {
                    let all_of = all.param_range();
let saved_of = piece.param_range();
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
        buffers: ByteCount(10_000_000),
    };
    assert_eq!(memory.total(), ByteCount(11_111_111));
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

/// Buffers lie on the host, wherever the model lies.
#[test]
fn buffers_take_a_copy_for_each_average_besides_their_two() {
    let unit = Unit::new("bn")
        .param(Param::new("w", [10]))
        .param(Param::new("mean", [30]).buffer())
        .param(Param::new("own", [7]).averaged_buffer());
    for averages in 0..3 {
        let spec = ModelSpec::new().unit(unit.clone());
        let spec = (0..averages).fold(spec, |spec, _| spec.averaged());
        let plan = Plan::new(spec, Mesh::new(2, 2).unwrap(), PlanOptions::default()).unwrap();
        let expected = ByteCount(4 * 37 * (2 + averages));
        assert_eq!(plan.memory().buffers, expected);
        for offload in [Offload::None, Offload::Optimizer, Offload::All] {
            assert_eq!(plan.memory_offloaded(offload).buffers, expected);
            assert_eq!(plan.memory_on_device(offload).buffers, ByteCount::ZERO);
        }
    }
}
