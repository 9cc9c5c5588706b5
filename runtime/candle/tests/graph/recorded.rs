//! The parameters that constructors ask for become a model.

use crate::common;
use candle_core::{DType, Result, Tensor};
use candle_nn::{Init, VarBuilder, embedding, linear, linear_no_bias};
use hsdp::{Mesh, ModelOptions, ModelSpec, Param, ShardedModel};
use hsdp_candle::{DeclarationError, Error, Recorded, record};
use hsdp_sharding::{AfterForward, Role, State};

/// An embedding, whose weight is asked for twice, two blocks, a norm and a head.
fn load(vb: &VarBuilder<'_>) -> Result<()> {
    embedding(10, 4, vb.pp("embed"))?;
    for layer in 0..2 {
        linear(4, 4, vb.pp(format!("h.{layer}")).pp("mlp"))?;
    }
    vb.get_with_hints(4, "norm.weight", Init::Const(1.0))?;
    let head = if vb.contains_tensor("embed.weight") { "embed" } else { "head" };
    linear_no_bias(4, 10, vb.pp(head)).map(drop)
}

fn recorded() -> Recorded {
    record(|vb| load(&vb)).expect("a model")
}

fn names(spec: &ModelSpec) -> Vec<(&str, Vec<&str>)> {
    spec.units()
        .iter()
        .map(|unit| {
            (unit.name.as_str(), unit.params.iter().map(|param| param.name.as_str()).collect())
        })
        .collect()
}

#[test]
fn patterns_make_units_in_the_order_of_the_forward() {
    let recorded = recorded();
    let spec = recorded.spec(&["embed", "h.*", "root"]).expect("units");
    let want = [
        ("embed", vec!["embed.weight"]),
        ("h.0", vec!["h.0.mlp.weight", "h.0.mlp.bias"]),
        ("h.1", vec!["h.1.mlp.weight", "h.1.mlp.bias"]),
        ("root", vec!["norm.weight"]),
    ];
    assert_eq!(names(&spec), want);
    let kept = spec.units().iter().map(|unit| unit.after_forward == AfterForward::Keep);
    assert_eq!(kept.collect::<Vec<_>>(), [true, false, false, false], "the tied one is kept");
    assert_eq!(recorded.params().len(), 6);

    // `root` takes what the others leave, wherever it stands; an earlier pattern goes first.
    let spec = recorded.spec(&["root", "h.1", "*.*.mlp"]).expect("units");
    let units: Vec<_> = spec.units().iter().map(|unit| unit.name.as_str()).collect();
    assert_eq!(units, ["root", "h.1", "h.0.mlp"]);
}

#[test]
fn patterns_that_make_no_units_are_refused() {
    let recorded = recorded();
    let refused = |patterns: &[&str]| recorded.spec(patterns).expect_err("refused").to_string();
    assert_eq!(
        refused(&["h.*"]),
        "no pattern takes embed.weight, norm.weight: the pattern `root` takes all that others leave"
    );
    let none = "takes no parameter: either none matches it, or earlier patterns take all";
    assert_eq!(refused(&["h.*", "h.0", "root"]), format!("pattern h.0 {none}"));
    assert_eq!(refused(&["h.*", "embed", "norm", "root"]), format!("pattern root {none}"));
    assert_eq!(refused(&["heads", "root"]), format!("pattern heads {none}"));
    let error = recorded.clone().keep("h.7").spec(&["h.*", "root"]).expect_err("no such unit");
    assert_eq!(error.to_string(), "the model has no unit h.7, it has h.0, h.1, root");
}

/// Another declaration than a trainable parameter has by itself.
fn declared(param: Param) -> Param {
    let mut declared = param.rows(2).matrices(2, 2, 4);
    declared.state = State::Elements(1);
    declared
}

#[test]
fn declarations_can_be_changed_and_units_kept() {
    let freeze = |param: Param| match &param.name {
        name if name.starts_with("h.0") => param.frozen(),
        name if name == "h.1.mlp.weight" => declared(param),
        _ => param,
    };
    let recorded = recorded().map(freeze).keep("h.1");
    let spec = recorded.spec(&["embed", "h.*", "root"]).expect("units");
    let of = |name: &str| &spec[spec.find(name).expect("a parameter")];
    assert_eq!(of("h.0.mlp.weight").role, Role::Frozen);
    assert_eq!(*of("h.1.mlp.weight"), declared(Param::new("h.1.mlp.weight", [4, 4])));
    assert_eq!(spec.units()[2].after_forward, AfterForward::Keep);
    let frozen = recorded.forward_only("h.0").spec(&["embed", "h.*", "root"]);
    let frozen = frozen.expect("all of its parameters are frozen");
    assert_eq!(frozen.units()[1].after_forward, AfterForward::Discard);
}

#[test]
fn one_name_with_two_shapes_is_refused() {
    let error = record(|vb| {
        linear(4, 4, vb.pp("a"))?;
        linear(8, 4, vb.pp("a"))
    });
    assert_eq!(
        error.expect_err("two shapes").to_string(),
        "parameter a.weight is asked for as [4, 4], and later as [4, 8]"
    );
}

#[test]
fn a_name_without_a_shape_is_refused() {
    let error = record(|vb| vb.pp("a").get_unchecked("weight")).expect_err("no shape");
    assert!(
        matches!(&error, Error::Declaration(DeclarationError::NoShape { parameter }) if parameter == "a.weight"),
        "{error}"
    );
    let error = record(|_| -> Result<Tensor> { candle_core::bail!("the model's own") });
    assert!(matches!(error, Err(Error::Candle(_))));
}

#[test]
fn a_model_larger_than_any_memory_can_be_recorded() {
    let size = 1 << 20;
    let recorded = record(|vb| linear(size, size, vb)).expect("no element is allocated");
    let spec = recorded.spec(&["root"]).expect("a unit");
    assert_eq!(spec.numel().get(), (1 << 40) + (1 << 20));
}

#[test]
fn initial_values_are_the_same_on_any_mesh() {
    let recorded = recorded();
    let all = |mesh: &str| {
        let mesh: Mesh = mesh.parse().expect("a mesh");
        let results = common::results(mesh.world_size(), |world| {
            let spec = recorded.spec(&["embed", "h.*", "root"]).expect("units");
            let model = ShardedModel::new(world, spec, ModelOptions::on(mesh), recorded.init(3));
            model.expect("a model").full_parameters().expect("a gather")
        });
        results.into_iter().next().expect("a rank")
    };
    let want = all("1x1");
    assert!(want["norm.weight"].iter().all(|value| *value == 1.0));
    assert!(want["h.0.mlp.bias"].iter().all(|value| value.abs() <= 0.5 && *value != 0.0));
    assert_ne!(want["h.0.mlp.weight"], want["h.1.mlp.weight"]);
    for mesh in ["1x2", "2x2"] {
        assert_eq!(all(mesh), want, "{mesh}");
    }
}

#[test]
fn a_parameter_that_was_not_recorded_has_no_initial_values() {
    let spec = ModelSpec::new().unit(hsdp::Unit::new("a").param(Param::new("a.weight", [4])));
    let options = ModelOptions::on(Mesh::new(1, 1).expect("one rank"));
    let made = ShardedModel::new(hsdp::World::single(), spec, options, recorded().init(3));
    let said = made.expect_err("no values").to_string();
    assert!(said.contains("a.weight") && said.contains("init"), "{said}");
}

/// candle_nn's batch norm changes its running statistics in its forward: they are no parameters.
#[test]
fn running_statistics_are_refused_by_name() {
    let load = |vb: VarBuilder<'_>| {
        linear(4, 4, vb.pp("first"))?;
        candle_nn::batch_norm(4, 1e-5, vb.pp("bn.1"))?;
        candle_nn::batch_norm(4, 1e-5, vb.pp("bn.2")).map(drop)
    };
    let error = record(load).expect_err("buffers");
    assert!(matches!(error, Error::Declaration(DeclarationError::Buffers { .. })), "{error:?}");
    let message = error.to_string();
    let names =
        "bn.1.running_mean, bn.1.running_var, bn.2.running_mean, bn.2.running_var are buffers";
    assert!(message.starts_with(names), "{message}");
}

#[test]
fn integers_are_refused_by_name() {
    let load = |vb: VarBuilder<'_>| {
        vb.get_with_hints_dtype(7, "embeddings.position_ids", Init::Const(0.0), DType::I64)
    };
    let error = record(load).expect_err("integers").to_string();
    assert!(error.starts_with("embeddings.position_ids (of i64) are buffers"), "{error}");
}

#[test]
fn a_declaration_keeps_its_name_and_shape() {
    let renamed = |mut param: Param| {
        param.name = format!("model.{}", param.name);
        param
    };
    let error = recorded().map(renamed).spec(&["root"]).expect_err("other names").to_string();
    let want = "`Recorded::map` declares parameter embed.weight as model.embed.weight of shape \
                [10, 4]";
    assert!(error.starts_with(want), "{error}");
    let reshaped = |mut param: Param| {
        param.shape = vec![1];
        param
    };
    let error = recorded().map(reshaped).spec(&["root"]).expect_err("other shapes");
    assert!(matches!(error, Error::Declaration(DeclarationError::Redeclared { .. })), "{error:?}");
}
