//! Generated models and meshes for the tests. Seeds are fixed, so a test gives the same result in
//! every run.

use hsdp_sharding::{
    Accumulation, DType, FullCopies, Granularity, Mesh, ModelSpec, Param, Role, StateOver, Unit,
    UnitId,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Sizes that divide badly.
const PRIMES: [usize; 8] = [2, 3, 7, 31, 37, 127, 257, 1009];

pub(crate) fn cases(cases: u32) -> ProptestConfig {
    let rng_seed = RngSeed::Fixed(0x6873_6470);
    ProptestConfig { cases, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
}

/// Scalars, single elements, primes, and up to three small dims.
pub(crate) fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        1 => Just(vec![]),
        1 => Just(vec![1]),
        2 => prop::sample::select(&PRIMES[..]).prop_map(|prime| vec![prime]),
        4 => prop::collection::vec(1usize..=24, 1..=3),
        2 => (1usize..=20).prop_map(|blocks| vec![32 * blocks]),
    ]
}

/// A parameter that may be cut anywhere, trainable more often than not.
fn param() -> impl Strategy<Value = Param> {
    (shape(), prop::bool::weighted(0.25)).prop_map(|(shape, frozen)| {
        let param = Param::new("", shape);
        if frozen { param.frozen() } else { param }
    })
}

fn named_unit(name: &str, params: Vec<Param>) -> Unit {
    params.into_iter().enumerate().fold(Unit::new(name), |unit, (index, mut param)| {
        param.name = format!("{name}.{index}");
        unit.param(param)
    })
}

pub(crate) fn unit() -> impl Strategy<Value = Unit> {
    prop::collection::vec(param(), 1..=6).prop_map(|params| named_unit("unit", params))
}

/// A unit in which some parameters are cut between rows, where they have rows, and others between
/// blocks.
pub(crate) fn unit_with_rows() -> impl Strategy<Value = Unit> {
    let rows = (1usize..=6).prop_map(Granularity::Rows);
    let blocks = (1usize..=300).prop_map(Granularity::Blocks);
    let granularity = prop_oneof![1 => Just(Granularity::Element), 4 => rows, 2 => blocks];
    let param = (param(), granularity).prop_map(|(mut param, granularity)| {
        if !param.shape.is_empty() {
            param.granularity = granularity;
        }
        param
    });
    prop::collection::vec(param, 1..=6).prop_map(|params| named_unit("unit", params))
}

/// A few units, some of them kept after their forward, and some with a compute dtype of their own.
pub(crate) fn model() -> impl Strategy<Value = ModelSpec> {
    let compute = prop::option::weighted(0.4, wire());
    let unit = (prop::collection::vec(param(), 1..=3), 0..3, compute);
    prop::collection::vec(unit, 1..=6).prop_map(|units| {
        let named = units.into_iter().enumerate().map(|(index, (params, after, compute))| {
            let unit = named_unit(&format!("h.{index}"), params);
            let unit = compute.into_iter().fold(unit, Unit::compute_in);
            match after {
                0 => unit.keep(),
                1 if !unit.is_trainable() => unit.forward_only(),
                _ => unit,
            }
        });
        named.fold(ModelSpec::new(), ModelSpec::unit)
    })
}

/// A model, and an order in which its forward uses the units.
pub(crate) fn ordered() -> impl Strategy<Value = (ModelSpec, Vec<UnitId>)> {
    model().prop_flat_map(|spec| {
        let order = Just(spec.unit_ids().collect::<Vec<_>>()).prop_shuffle();
        (Just(spec), order)
    })
}

/// Returns the model with the frozen parameters of some units, one for each bit of `units`, stored
/// in the unit's compute dtype. That is `dtype` unless the unit has its own.
pub(crate) fn stored(spec: &ModelSpec, dtype: DType, units: u8) -> ModelSpec {
    let unit = |(index, unit): (usize, &Unit)| {
        let mut unit = unit.clone();
        let dtype = unit.compute_dtype.unwrap_or(dtype);
        let is_chosen = units & (1 << index) != 0 && dtype != DType::F32;
        for param in unit.params.iter_mut().filter(|it| is_chosen && it.role == Role::Frozen) {
            param.stored = Some(dtype);
        }
        unit
    };
    spec.units().iter().enumerate().map(unit).fold(ModelSpec::new(), ModelSpec::unit)
}

/// Any mesh from 1x1 to 8x8.
pub(crate) fn mesh() -> impl Strategy<Value = Mesh> {
    (1usize..=8, 1usize..=8)
        .prop_map(|(replicate, shard)| Mesh::new(replicate, shard).expect("small and not empty"))
}

/// The dtypes in which parameters and gradients travel.
pub(crate) fn wire() -> impl Strategy<Value = DType> {
    prop::sample::select(&[DType::F32, DType::F16, DType::BF16][..])
}

pub(crate) fn state_over() -> impl Strategy<Value = StateOver> {
    prop::sample::select(&StateOver::ALL[..])
}

pub(crate) fn full_copies() -> impl Strategy<Value = FullCopies> {
    prop::sample::select(&FullCopies::ALL[..])
}

pub(crate) fn accumulation() -> impl Strategy<Value = Accumulation> {
    prop::sample::select(&Accumulation::ALL[..])
}
