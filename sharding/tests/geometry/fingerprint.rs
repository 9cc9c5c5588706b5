//! The fingerprint: equal for equal plans, different for any difference, and stable.

use std::collections::HashMap;

use hsdp_sharding::{
    Accumulation, DType, FullCopies, Mesh, ModelSpec, Param, Plan, PlanOptions, State, StateOver,
    Unit,
};

fn block() -> Unit {
    Unit::new("block").param(Param::new("w", [64, 32])).param(Param::new("b", [64]))
}

fn model_of(block: Unit) -> ModelSpec {
    ModelSpec::new()
        .unit(Unit::new("embedding").param(Param::new("wte", [100, 32])))
        .unit(block)
        .tie("head", "wte")
}

fn fingerprint(spec: ModelSpec, mesh: &str, options: PlanOptions) -> u64 {
    let mesh: Mesh = mesh.parse().expect("a mesh");
    Plan::new(spec, mesh, options).expect("a small model").fingerprint()
}

fn base() -> u64 {
    fingerprint(model_of(block()), "2x3", PlanOptions::default())
}

#[test]
fn equal_plans_have_equal_fingerprints() {
    assert_eq!(base(), base());
}

#[test]
fn it_is_the_same_everywhere_and_always() {
    // If this number changes, ranks of old and new builds refuse each other. Raise the version
    // then.
    assert_eq!(base(), 0xb8ad_da1a_3941_0117, "{:#018x}", base());
}

#[test]
fn every_difference_shows() {
    let options = PlanOptions::default();
    let with_block = |block| fingerprint(model_of(block), "2x3", options);
    let with_mesh = |mesh| fingerprint(model_of(block()), mesh, options);
    let with_options = |options| fingerprint(model_of(block()), "2x3", options);
    let with_block_in = |param_dtype, block| {
        fingerprint(model_of(block), "2x3", PlanOptions { param_dtype, ..options })
    };
    let stored = |dtype| Param::new("b", [64]).frozen().stored_in(dtype);
    let w = || Param::new("w", [64, 32]);
    let b = || Param::new("b", [64]);
    let unit = |params: [Param; 2]| params.into_iter().fold(Unit::new("block"), Unit::param);
    let renamed = block().params.into_iter().fold(Unit::new("h.0"), Unit::param);
    let plain = ModelSpec::new().unit(Unit::new("embedding").param(Param::new("wte", [100, 32])));

    let all = [
        ("base", base()),
        ("3x2", with_mesh("3x2")),
        ("6x1", with_mesh("6x1")),
        ("2x4", with_mesh("2x4")),
        ("kept", with_block(block().keep())),
        ("renamed unit", with_block(renamed)),
        ("renamed parameter", with_block(unit([w(), Param::new("c", [64])]))),
        ("order", with_block(unit([b(), w()]))),
        ("shape of equal size", with_block(unit([Param::new("w", [32, 64]), b()]))),
        ("rank of the shape", with_block(unit([Param::new("w", [2048]), b()]))),
        ("frozen", with_block(unit([w(), b().frozen()]))),
        ("stored in bf16", with_block_in(DType::BF16, unit([w(), stored(DType::BF16)]))),
        ("frozen of bf16", with_block_in(DType::BF16, unit([w(), b().frozen()]))),
        ("stored in f16", with_block_in(DType::F16, unit([w(), stored(DType::F16)]))),
        ("frozen of f16", with_block_in(DType::F16, unit([w(), b().frozen()]))),
        ("a block in f32", with_block(block().compute_in(DType::F32))),
        ("a block in bf16", with_block(block().compute_in(DType::BF16))),
        ("a block in f16", with_block(block().compute_in(DType::F16))),
        ("a kept block in f32", with_block(block().compute_in(DType::F32).keep())),
        ("rows", with_block(unit([w().rows(1), b()]))),
        ("two rows", with_block(unit([w().rows(2), b()]))),
        ("blocks of an element", with_block(unit([w().blocks(1), b()]))),
        ("blocks as long as two rows", with_block(unit([w().blocks(64), b()]))),
        ("declared as a matrix", with_block(unit([w().matrices(1, 64, 32), b()]))),
        ("declared as two matrices", with_block(unit([w().matrices(2, 32, 32), b()]))),
        ("matrices in blocks", with_block(unit([w().matrices(2, 32, 32).blocks(64), b()]))),
        ("one parameter more", with_block(block().param(Param::new("c", [1])))),
        ("a parameter b2", with_block(block().param(Param::new("b2", [3])))),
        ("a frozen b2", with_block(block().param(Param::new("b2", [3]).frozen()))),
        ("a buffer b2", with_block(block().param(Param::new("b2", [3]).buffer()))),
        ("an averaged buffer", with_block(block().param(Param::new("b2", [3]).averaged_buffer()))),
        ("another buffer", with_block(block().param(Param::new("b3", [3]).buffer()))),
        ("a longer buffer", with_block(block().param(Param::new("b2", [4]).buffer()))),
        ("a buffer of two dims", with_block(block().param(Param::new("b2", [3, 1]).buffer()))),
        ("a batch norm", with_block(block().batch_norm("bn", 3))),
        ("a batch norm over its own batch", {
            let mut own = block().batch_norm("bn", 3);
            own.statistics.clear();
            with_block(own)
        }),
        ("a buffer of another unit", {
            let other = Unit::new("embedding").param(Param::new("wte", [100, 32]));
            let other = other.param(Param::new("b2", [3]).buffer());
            let spec = ModelSpec::new().unit(other).unit(block()).tie("head", "wte");
            fingerprint(spec, "2x3", options)
        }),
        ("no tie", fingerprint(plain.clone().unit(block()), "2x3", options)),
        ("other alias", fingerprint(plain.clone().unit(block()).tie("lm", "wte"), "2x3", options)),
        ("other target", fingerprint(plain.unit(block()).tie("head", "w"), "2x3", options)),
        ("parameters in bf16", with_options(PlanOptions { param_dtype: DType::BF16, ..options })),
        ("wire in bf16", with_options(PlanOptions { reduce_dtype: DType::BF16, ..options })),
        ("wire in f16", with_options(PlanOptions { reduce_dtype: DType::F16, ..options })),
        ("every", with_options(PlanOptions { accumulation: Accumulation::Every, ..options })),
        ("local", with_options(PlanOptions { accumulation: Accumulation::Local, ..options })),
        (
            "one full copy",
            with_options(PlanOptions { full_copies: FullCopies::PerProcess, ..options }),
        ),
        ("prefetch", with_options(PlanOptions { prefetch: 2, ..options })),
        ("state over the world", with_options(PlanOptions { state: StateOver::World, ..options })),
    ];
    let mut seen = HashMap::new();
    for (what, fingerprint) in all {
        if let Some(other) = seen.insert(fingerprint, what) {
            panic!("`{what}` has the fingerprint of `{other}`");
        }
    }
}

#[test]
fn of_the_state_of_an_optimizer_blocks_alone_show() {
    let state = |state| {
        let spec = model_of(block()).updated_by(|_| state);
        fingerprint(spec, "2x3", PlanOptions::default())
    };
    assert_eq!([State::Elements(7), State::Factored, State::Owned(3)].map(state), [base(); 3]);
    let blocks = [256, 128].map(|block| state(State::EightBit { block }));
    assert!(blocks[0] != base() && blocks[1] != base() && blocks[0] != blocks[1]);
}

#[test]
fn moving_a_boundary_between_names_shows() {
    let named = |unit: &str, param: &str| {
        let spec = ModelSpec::new().unit(Unit::new(unit).param(Param::new(param, [8])));
        fingerprint(spec, "1x2", PlanOptions::default())
    };
    assert_ne!(named("ab", "c"), named("a", "bc"));
}
