//! Plans and layouts that are refused, and the texts of their errors.

use hsdp_sharding::{
    DType, Error, FullCopies, Mesh, ModelSpec, Param, Plan, PlanOptions, StateOver, Unit,
    UnitLayout,
};

fn plan(spec: ModelSpec, options: PlanOptions) -> Result<Plan, Error> {
    Plan::new(spec, Mesh::SINGLE, options)
}

fn unit(shape: &[usize]) -> Unit {
    Unit::new("h.0").param(Param::new("w", shape))
}

#[test]
fn a_plan_refuses_what_the_description_gets_wrong() {
    let error = plan(ModelSpec::new(), PlanOptions::default()).unwrap_err();
    assert_eq!(error, Error::EmptyModel);
}

#[test]
fn a_layout_refuses_it_too() {
    let empty = UnitLayout::new(&Unit::new("h.0"), 2).unwrap_err();
    assert_eq!(empty, Error::EmptyUnit { unit: "h.0".into() });
    let zero = UnitLayout::new(&unit(&[3, 0]), 2).unwrap_err();
    assert_eq!(zero, Error::ZeroDim { param: "w".into(), shape: vec![3, 0], dim: 1 });
}

#[test]
fn a_shard_group_has_members() {
    let error = UnitLayout::new(&unit(&[3]), 0).unwrap_err().to_string();
    assert_eq!(error, "unit `h.0`: a shard group of 0 ranks cannot hold it");
}

#[test]
fn parameters_and_gradients_travel_as_floats_of_at_most_32_bits() {
    let spec = || ModelSpec::new().unit(unit(&[3]));
    for dtype in DType::ALL {
        let fits = dtype.is_float() && dtype.size_bytes() <= 4;
        let parameters = PlanOptions { param_dtype: dtype, ..PlanOptions::default() };
        let gradients = PlanOptions { reduce_dtype: dtype, ..PlanOptions::default() };
        assert_eq!(plan(spec(), parameters).is_ok(), fits);
        assert_eq!(plan(spec(), gradients).is_ok(), fits);
    }
    let options = PlanOptions { reduce_dtype: DType::I64, ..PlanOptions::default() };
    let error = plan(spec(), options).unwrap_err().to_string();
    assert_eq!(error, "reduce_dtype = i64: expected f32, f16 or bf16");
}

#[test]
fn replicas_that_divide_state_share_no_copies() {
    let options = |state, full_copies| PlanOptions { state, full_copies, ..Default::default() };
    let planned = |options| plan(ModelSpec::new().unit(unit(&[3])), options);
    let refused = planned(options(StateOver::World, FullCopies::PerProcess)).unwrap_err();
    assert_eq!(refused, Error::SharedCopies);
    assert!(planned(options(StateOver::World, FullCopies::PerRank)).is_ok());
    assert!(planned(options(StateOver::Shards, FullCopies::PerProcess)).is_ok());
}

#[test]
fn what_no_machine_holds_is_refused_and_not_wrapped() {
    let limit = 1u64 << 48;
    for shape in [vec![1 << 20, 1 << 29], vec![usize::MAX, 3], vec![usize::MAX; 3]] {
        for param in [Param::new("w", shape.clone()), Param::new("w", shape.clone()).rows(1)] {
            let error = UnitLayout::new(&Unit::new("h.0").param(param), 3).unwrap_err();
            assert!(matches!(error, Error::TooLarge { limit: said, .. } if said == limit));
        }
    }
    let units = (0..3).map(|index| {
        Unit::new(format!("h.{index}")).param(Param::new(format!("w{index}"), [1 << 47]))
    });
    let error = plan(units.fold(ModelSpec::new(), ModelSpec::unit), PlanOptions::default());
    let expected = format!(
        "the model takes {} elements with its padding, more than {limit}",
        3 * (1u64 << 47)
    );
    assert_eq!(error.unwrap_err().to_string(), expected);
}

#[test]
fn whole_rows_on_too_many_ranks_are_refused_when_padding_explodes() {
    // One row that may not be cut, over so many ranks that the padding alone exceeds the limit.
    let unit = Unit::new("h.0").param(Param::new("w", [1, 1 << 30]).rows(1));
    let error = UnitLayout::new(&unit, 1 << 20).unwrap_err();
    assert_eq!(
        error.to_string(),
        "unit `h.0` takes 1125899906842624 elements with its padding, more than 281474976710656"
    );
}

fn refused(param_dtype: DType, params: [Param; 2]) -> String {
    let unit = params.into_iter().fold(Unit::new("h.0"), Unit::param);
    let options = PlanOptions { param_dtype, ..PlanOptions::default() };
    let refused = plan(ModelSpec::new().unit(unit), options);
    refused.expect_err("it is refused").to_string()
}

#[test]
fn only_frozen_parameters_are_stored_in_the_dtype_in_which_they_are_gathered() {
    let w = || Param::new("w", [3]);
    let base = || Param::new("base", [3]).frozen();
    assert_eq!(
        refused(DType::BF16, [w().stored_in(DType::BF16), base()]),
        "parameter `w`, stored in bf16: it is trained, which needs an f32 master: mark it `frozen`"
    );
    assert_eq!(
        refused(DType::F32, [w(), base().stored_in(DType::F32)]),
        "parameter `base`, stored in f32: expected f16 or bf16; f32 needs no `stored_in`"
    );
    assert_eq!(
        refused(DType::F32, [w(), base().stored_in(DType::BF16)]),
        "parameter `base`, stored in bf16: its unit is gathered in f32: set param_dtype, or \
         `compute_in` of the unit, to the dtype in which it is stored, or do not use `stored_in`"
    );
    let beside = "stored in another way: store all frozen parameters of a unit alike";
    let other = || Param::new("other", [3]).frozen();
    assert_eq!(
        refused(DType::BF16, [other(), base().stored_in(DType::BF16)]),
        format!(
            "parameter `base`, stored in bf16: `other` of the same unit is frozen, and {beside}"
        )
    );
    assert_eq!(
        refused(DType::BF16, [other().stored_in(DType::F16), base().stored_in(DType::BF16)]),
        format!(
            "parameter `other`, stored in f16: `base` of the same unit is frozen, and {beside}"
        )
    );
}

#[test]
fn a_unit_computes_in_a_dtype_of_training() {
    for dtype in [DType::F64, DType::I32, DType::U64] {
        let unit = Unit::new("head").param(Param::new("w", [3])).compute_in(dtype);
        let error = plan(ModelSpec::new().unit(unit), PlanOptions::default());
        let expected = format!("unit `head` computes in {dtype}: expected f32, f16 or bf16");
        assert_eq!(error.expect_err("it is refused").to_string(), expected);
    }
}

/// The dtype in which a parameter is stored is that of its unit, whatever the plan's is.
#[test]
fn a_parameter_is_stored_in_the_compute_dtype_of_its_unit() {
    let unit = |compute| {
        let base = Param::new("base", [3]).frozen().stored_in(DType::BF16);
        Unit::new("h.0").param(base).compute_in(compute)
    };
    let planned = |param_dtype, compute| {
        let options = PlanOptions { param_dtype, ..PlanOptions::default() };
        plan(ModelSpec::new().unit(unit(compute)), options)
    };
    assert!(planned(DType::F32, DType::BF16).is_ok());
    let error = planned(DType::BF16, DType::F32).expect_err("it is gathered in f32");
    let expected = "parameter `base`, stored in bf16: its unit is gathered in f32: ";
    assert!(error.to_string().starts_with(expected), "{error}");
}
