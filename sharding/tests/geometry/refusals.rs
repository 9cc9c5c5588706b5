//! Plans and layouts that are refused, and the texts of their errors.

use hsdp_sharding::{DType, Error, Mesh, ModelSpec, Param, Plan, PlanOptions, Unit, UnitLayout};

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
