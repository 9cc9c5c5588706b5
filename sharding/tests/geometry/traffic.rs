//! The formulas of traffic against a count, element by element, of the bytes that each rank would
//! receive.

use hsdp_sharding::{
    Accumulation, AfterForward, Axis, ByteCount, DType, Flow, FullCopies, Mesh, ModelSpec, Param,
    Plan, PlanOptions, Rank, Region, Role, StateOver, Traffic, Unit, UnitId,
};
use proptest::prelude::*;

use crate::generators::{accumulation, cases, full_copies, mesh, model, state_over, wire};
use crate::slices;

/// The shard that owns each element of a region.
fn owners(region: Region) -> impl Iterator<Item = usize> {
    (0..region.len).map(move |element| element / region.shard_len)
}

/// The part that owns each of `len` elements when they are split over `parts` as evenly as
/// possible, in order.
fn dealt(len: usize, parts: usize) -> Vec<usize> {
    let mut shares = vec![0; parts];
    (0..len).for_each(|element| shares[element % parts] += 1);
    shares.into_iter().enumerate().flat_map(|(part, share)| vec![part; share]).collect()
}

/// Plays a step and counts the bytes that one rank receives.
struct Counter<'a> {
    plan: &'a Plan,
    rank: Rank,
    seen: Traffic,
}

impl Counter<'_> {
    fn record(flow: &mut Flow, bytes: usize) {
        flow.calls += 1;
        flow.bytes += ByteCount::of(bytes);
    }

    /// Receives every element that another member of the shard group owns; with one copy, only on
    /// the rank that holds it.
    fn all_gather(&mut self, unit: usize) {
        let layout = &self.plan.layouts()[unit];
        let own = self.plan.mesh().coordinate(self.rank).shard_index;
        let foreign = owners(layout.trainable())
            .chain(owners(layout.frozen()))
            .filter(|&owner| owner != own)
            .count();
        let declared = self.plan.spec().units()[unit].compute_dtype;
        let size = declared.unwrap_or(self.plan.options().param_dtype).size_bytes();
        match self.plan.options().full_copies {
            FullCopies::PerRank if layout.shard_size() > 1 => {
                Self::record(&mut self.seen.all_gather, foreign * size);
            }
            FullCopies::PerProcess if self.plan.mesh().world_size() > 1 => {
                let copied = if self.rank == Rank::new(0) { foreign * size } else { 0 };
                Self::record(&mut self.seen.all_gather, copied);
            }
            _ => {}
        }
    }

    /// Receives, for every element that it owns, one contribution of each other member of the shard
    /// group.
    fn reduce_scatter(&mut self, unit: usize) {
        let layout = &self.plan.layouts()[unit];
        let group = self.plan.mesh().group(Axis::Shard, self.rank);
        let own = self.plan.mesh().coordinate(self.rank).shard_index;
        let mut contributions = 0;
        for owner in owners(layout.trainable()) {
            let others = group.iter().filter(|&&member| member != self.rank).count();
            contributions += if owner == own { others } else { 0 };
        }
        if group.len() > 1 {
            let size = self.plan.options().reduce_dtype.size_bytes();
            Self::record(&mut self.seen.reduce_scatter, contributions * size);
        }
    }

    /// Receives, for every element that it sums, the contributions of the others, and every other
    /// element once, as a finished sum.
    fn all_reduce(&mut self, unit: usize) {
        let layout = &self.plan.layouts()[unit];
        let replicas = self.plan.mesh().replicate_size();
        let own = self.plan.mesh().coordinate(self.rank).replicate_index;
        let wire = self.plan.options().reduce_dtype.size_bytes();
        let mut bytes = 0;
        for owner in dealt(layout.trainable().shard_len, replicas) {
            bytes += if owner == own { (replicas - 1) * wire } else { 4 };
        }
        if replicas > 1 {
            Self::record(&mut self.seen.all_reduce, bytes);
        }
    }

    /// Receives, for every element of its slice, one contribution of each other replica.
    fn scatter_sums(&mut self, unit: usize) {
        let slice = slices::updated(self.plan, UnitId::new(unit))[self.rank.index()].clone();
        let group = self.plan.mesh().group(Axis::Replicate, self.rank);
        let others = group.into_iter().filter(|member| *member != self.rank).count();
        let contributions: usize = slice.map(|_| others).sum();
        let size = self.plan.options().reduce_dtype.size_bytes();
        Self::record(&mut self.seen.scatter_sums, contributions * size);
    }

    /// Receives every element of the slices of the other replicas.
    fn gather_slices(&mut self, unit: usize) {
        let slices = slices::updated(self.plan, UnitId::new(unit));
        let group = self.plan.mesh().group(Axis::Replicate, self.rank);
        let others = group.into_iter().filter(|member| *member != self.rank);
        let elements: usize = others.map(|member| slices[member.index()].len()).sum();
        let declared = self.plan.spec().units()[unit].compute_dtype;
        let size = declared.unwrap_or(self.plan.options().param_dtype).size_bytes();
        Self::record(&mut self.seen.gather_slices, elements * size);
    }

    fn update(&mut self) {
        for (unit, spec) in self.plan.spec().units().iter().enumerate() {
            if slices::divided(self.plan) && spec.is_trainable() {
                self.gather_slices(unit);
            }
        }
    }

    fn microbatch(&mut self, place: Place) {
        let units = self.plan.spec().units();
        (0..units.len()).for_each(|unit| self.all_gather(unit));
        for unit in (0..units.len()).rev() {
            if units[unit].after_forward == AfterForward::Reshard {
                self.all_gather(unit);
            }
            if units[unit].params.iter().any(|param| param.role == Role::Trainable) {
                self.reduce(unit, place);
            }
        }
    }

    fn reduce(&mut self, unit: usize, place: Place) {
        let mode = self.plan.options().accumulation;
        if place == Place::Last || mode != Accumulation::Local {
            self.reduce_scatter(unit);
        }
        if place == Place::Last || mode == Accumulation::Every {
            match slices::divided(self.plan) {
                true => self.scatter_sums(unit),
                false => self.all_reduce(unit),
            }
        }
    }
}

/// The place of a microbatch in its step.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Earlier,
    Last,
}

fn counted(plan: &Plan, rank: Rank, microbatches: u64) -> Traffic {
    let mut counter = Counter { plan, rank, seen: Traffic::default() };
    for left in (0..microbatches).rev() {
        counter.microbatch(if left == 0 { Place::Last } else { Place::Earlier });
    }
    if microbatches > 0 {
        counter.update();
    }
    counter.seen
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn the_formulas_are_what_is_counted(
        spec in model(),
        mesh in mesh(),
        (param_dtype, reduce_dtype) in (wire(), wire()),
        (accumulation, full_copies) in (accumulation(), full_copies()),
        (state, microbatches) in (state_over(), 0u64..=3),
    ) {
        let full_copies = match state {
            StateOver::Shards => full_copies,
            StateOver::World => FullCopies::PerRank,
        };
        let options = PlanOptions {
            param_dtype, reduce_dtype, accumulation, full_copies, state, ..Default::default()
        };
        let plan = Plan::new(spec, mesh, options).unwrap();
        for rank in [0, mesh.world_size() / 2, mesh.world_size() - 1].map(Rank::new) {
            prop_assert_eq!(plan.traffic(rank, microbatches), counted(&plan, rank, microbatches));
        }
    }
}

fn small_plan(mesh: &str, accumulation: Accumulation) -> Plan {
    let options = PlanOptions { accumulation, ..PlanOptions::default() };
    small_plan_with(mesh, options)
}

fn small_plan_with(mesh: &str, options: PlanOptions) -> Plan {
    let spec = ModelSpec::new()
        .unit(Unit::new("a").param(Param::new("w", [256])).param(Param::new("t", [64]).frozen()))
        .unit(Unit::new("b").param(Param::new("v", [128])).keep());
    Plan::new(spec, mesh.parse().expect("a mesh"), options).expect("two small units")
}

#[test]
fn a_step_by_hand() {
    let traffic = small_plan("2x2", Accumulation::ReduceScatter).traffic(Rank::new(1), 3);
    // Unit a is gathered twice a microbatch (160 foreign elements), unit b once (64).
    let all_gather = Flow { calls: 9, bytes: ByteCount(3 * (2 * 160 + 64) * 4) };
    let reduce_scatter = Flow { calls: 6, bytes: ByteCount(3 * (128 + 64) * 4) };
    // One replica more: half of a shard comes as contributions, the other half as sums.
    let all_reduce = Flow { calls: 2, bytes: ByteCount((128 + 64) * 4) };
    assert_eq!(traffic, Traffic { all_gather, reduce_scatter, all_reduce, ..Traffic::default() });
    assert_eq!(traffic.total().calls, 17);
}

/// Slices are halves of the 128 and 64 trainable elements of a shard.
#[test]
fn a_step_with_state_over_the_world_by_hand() {
    let options =
        PlanOptions { param_dtype: DType::BF16, state: StateOver::World, ..PlanOptions::default() };
    let traffic = small_plan_with("2x2", options).traffic(Rank::new(1), 3);
    assert_eq!(traffic.scatter_sums, Flow { calls: 2, bytes: ByteCount((64 + 32) * 4) });
    assert_eq!(traffic.gather_slices, Flow { calls: 2, bytes: ByteCount((64 + 32) * 2) });
    assert_eq!(traffic.all_reduce, Flow::NONE);
    assert_eq!(traffic.total().calls, 9 + 6 + 2 + 2);
    let one_replica = |state| small_plan_with("1x2", PlanOptions { state, ..options });
    assert_eq!(
        one_replica(StateOver::World).traffic(Rank::new(1), 3),
        one_replica(StateOver::Shards).traffic(Rank::new(1), 3)
    );
}

/// Every unit is kept. The first one computes in f32, all else and the wire are bf16.
#[test]
fn a_step_of_two_dtypes_by_hand() {
    let spec = ModelSpec::new()
        .unit(Unit::new("a").param(Param::new("w", [256])).compute_in(DType::F32).keep())
        .unit(Unit::new("b").param(Param::new("v", [128])).keep());
    let narrow =
        PlanOptions { param_dtype: DType::BF16, reduce_dtype: DType::BF16, ..Default::default() };
    let plan = Plan::new(spec, Mesh::new(2, 4).unwrap(), narrow).expect("two small units");
    // Shards of 64 and 32 elements: three more of each in a gather, of four bytes and of two.
    let all_gather = Flow { calls: 2, bytes: ByteCount(3 * (64 * 4 + 32 * 2)) };
    let reduce_scatter = Flow { calls: 2, bytes: ByteCount(3 * (64 + 32) * 2) };
    // One half of a shard comes as contributions, the other one as sums in f32.
    let all_reduce = Flow { calls: 2, bytes: ByteCount((32 + 16) * 2 + (32 + 16) * 4) };
    let expected = Traffic { all_gather, reduce_scatter, all_reduce, ..Traffic::default() };
    assert_eq!(plan.traffic(Rank::new(5), 1), expected);
}

#[test]
fn modes_differ_in_how_often_they_reduce() {
    let calls = |accumulation| {
        let traffic = small_plan("2x2", accumulation).traffic(Rank::new(0), 5);
        [traffic.all_gather.calls, traffic.reduce_scatter.calls, traffic.all_reduce.calls]
    };
    assert_eq!(calls(Accumulation::ReduceScatter), [15, 10, 2]);
    assert_eq!(calls(Accumulation::Every), [15, 10, 10]);
    assert_eq!(calls(Accumulation::Local), [15, 2, 2]);
}

#[test]
fn an_axis_of_size_one_costs_nothing() {
    for accumulation in Accumulation::ALL {
        let traffic = |mesh| small_plan(mesh, accumulation).traffic(Rank::new(0), 2);
        assert_eq!(traffic("1x1"), Traffic::default());
        assert_eq!(traffic("1x4").all_reduce, Flow::NONE);
        assert_eq!(traffic("4x1").all_gather, Flow::NONE);
        assert_eq!(traffic("4x1").reduce_scatter, Flow::NONE);
    }
}

#[test]
fn a_step_without_microbatches_costs_nothing() {
    for accumulation in Accumulation::ALL {
        let traffic = small_plan("2x2", accumulation).traffic(Rank::new(0), 0);
        assert_eq!(traffic, Traffic::default());
    }
}

#[test]
#[should_panic(expected = "rank 4 is not in the mesh 2x2")]
fn a_rank_outside_has_no_traffic() {
    let _ = small_plan("2x2", Accumulation::Every).traffic(Rank::new(4), 1);
}

#[test]
fn units_of_frozen_parameters_are_gathered_only() {
    let unit = Unit::new("u").param(Param::new("t", [100]).frozen());
    let mesh = Mesh::new(2, 2).unwrap();
    let plan = Plan::new(ModelSpec::new().unit(unit), mesh, PlanOptions::default()).unwrap();
    let traffic = plan.traffic(Rank::new(3), 2);
    assert_eq!(traffic.all_gather, Flow { calls: 4, bytes: ByteCount(4 * 64 * 4) });
    assert_eq!((traffic.reduce_scatter, traffic.all_reduce), (Flow::NONE, Flow::NONE));
}
