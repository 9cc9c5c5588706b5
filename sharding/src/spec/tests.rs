use super::*;
use crate::{ElemCount, Error};

fn weight(name: &str) -> Param {
    Param::new(name, [4, 3])
}

fn model(params: impl IntoIterator<Item = Param>) -> ModelSpec {
    ModelSpec::new().unit(params.into_iter().fold(Unit::new("only"), Unit::param))
}

fn refusal(spec: &ModelSpec) -> String {
    spec.validate().unwrap_err().to_string()
}

#[test]
fn parameters_are_numbered_unit_by_unit() {
    let spec = ModelSpec::new()
        .unit(Unit::new("first").param(weight("a")).param(weight("b")))
        .unit(Unit::new("second").param(weight("c")));
    let numbered: Vec<_> =
        spec.params().map(|(id, param)| (id.unit.index(), id.index, param.name.as_str())).collect();
    assert_eq!(numbered, [(0, 0, "a"), (0, 1, "b"), (1, 0, "c")]);
    assert!(spec.params().all(|(id, param)| spec.find(&param.name) == Some(id)));
    assert!(spec.params().all(|(id, param)| &spec[id] == param));
    assert_eq!(spec.validate(), Ok(()));
}

#[test]
fn elements_are_counted_without_padding() {
    let unit = Unit::new("unit")
        .param(weight("a"))
        .param(Param::new("scalar", []))
        .param(Param::new("table", [2, 2, 2]).frozen());
    assert_eq!(unit.numel(), ElemCount(12 + 1 + 8));
    assert_eq!(unit.trainable_numel(), ElemCount(12 + 1));
    assert!(unit.is_trainable());
    assert_eq!(Param::new("huge", [usize::MAX, 2]).numel(), usize::MAX);
}

#[test]
fn an_alias_stands_for_its_parameter_and_adds_none() {
    let spec = model([weight("wte"), weight("w")]).tie("head", "wte").tie("other", "wte");
    assert_eq!(spec.validate(), Ok(()));
    assert_eq!(spec.find("head"), spec.find("wte"));
    assert_eq!(spec.find("other"), spec.find("wte"));
    assert_eq!(spec.find("nowhere"), None);
    assert_eq!(spec.numel(), ElemCount(24));
    assert!(spec.ties().eq([("head", "wte"), ("other", "wte")]));
}

#[test]
fn a_tie_may_be_declared_before_its_parameter() {
    let spec = ModelSpec::new().tie("head", "wte").unit(Unit::new("u").param(weight("wte")));
    assert_eq!(spec.validate(), Ok(()));
    assert_eq!(spec.find("head"), spec.find("wte"));
}

#[test]
fn wrapping_closes_a_unit_before_it_would_exceed_the_size() {
    let sizes = [3, 4, 3, 11, 5, 5, 1];
    let params = sizes.iter().enumerate().map(|(i, &len)| Param::new(format!("p{i}"), [len]));
    let spec = ModelSpec::wrapped(params, ElemCount(10));
    let units: Vec<Vec<usize>> =
        spec.units().iter().map(|u| u.params.iter().map(Param::numel).collect()).collect();
    assert_eq!(units, [vec![3, 4, 3], vec![11], vec![5, 5], vec![1]]);
    let names: Vec<_> = spec.units().iter().map(|unit| unit.name.as_str()).collect();
    assert_eq!(names, ["unit.0", "unit.1", "unit.2", "unit.3"]);
    assert_eq!(spec.validate(), Ok(()));
}

#[test]
fn wrapping_nothing_makes_no_unit() {
    assert_eq!(ModelSpec::wrapped([], ElemCount(10)).validate(), Err(Error::EmptyModel));
}

#[test]
fn empty_models_and_units_are_refused() {
    assert_eq!(refusal(&ModelSpec::new()), "the model has 0 units");
    assert_eq!(refusal(&model([])), "unit `only` has 0 parameters");
}

#[test]
fn names_are_unique_over_the_model() {
    let twice = model([weight("a"), weight("b")]).unit(Unit::new("next").param(weight("b")));
    let expected = "two parameters are called `b`: number 1 and number 2 of the model";
    assert_eq!(refusal(&twice), expected);
    let units = model([weight("a")]).unit(Unit::new("only").param(weight("b")));
    let expected = "two units are called `only`: number 0 and number 1 of the model";
    assert_eq!(refusal(&units), expected);
}

#[test]
fn a_setting_is_stated_once() {
    let spec = model([weight("w")]).setting("heads", 4).setting("eps", 1e-6);
    assert_eq!(spec.validate(), Ok(()));
    let [other, same] = [8, 4].map(|heads| refusal(&spec.clone().setting("heads", heads)));
    assert_eq!(other, "setting `heads` is stated twice: 4 and 8");
    assert_eq!(same, "setting `heads` is stated twice: 4 and 4");
}

#[test]
fn parameters_without_elements_are_refused() {
    let spec = model([weight("a"), Param::new("b", [4, 0, 2])]);
    assert_eq!(refusal(&spec), "parameter `b` of shape [4, 0, 2]: dim 1 has size 0");
}

#[test]
fn pieces_of_rows_need_rows() {
    let rest = "rows: that needs at least 1 row and 1 dim";
    let none = model([weight("a").rows(0)]);
    let expected = format!("parameter `a` of shape [4, 3] cannot be cut into pieces of 0 {rest}");
    assert_eq!(refusal(&none), expected);
    let scalar = model([Param::new("s", []).rows(2)]);
    let expected = format!("parameter `s` of shape [] cannot be cut into pieces of 2 {rest}");
    assert_eq!(refusal(&scalar), expected);
}

#[test]
fn ties_that_lead_nowhere_new_are_refused() {
    let refused = [
        (("head", "nowhere"), TieProblem::UnknownTarget),
        (("second", "alias"), TieProblem::TargetIsAlias),
        (("self", "self"), TieProblem::Itself),
        (("b", "a"), TieProblem::AliasIsParameter),
        (("alias", "b"), TieProblem::AliasIsTaken),
    ];
    for ((alias, target), problem) in refused {
        let spec = model([weight("a"), weight("b")]).tie("alias", "a").tie(alias, target);
        let (alias, target) = (alias.to_owned(), target.to_owned());
        assert_eq!(spec.validate(), Err(Error::InvalidTie { alias, target, problem }));
    }
    let spec = model([weight("a")]).tie("head", "nowhere");
    assert_eq!(refusal(&spec), "tie `head` -> `nowhere`: no parameter has the target's name");
}

#[test]
fn a_unit_for_the_forward_alone_trains_nothing() {
    let unit = Unit::new("u").param(weight("a").frozen()).param(weight("b")).forward_only();
    let expected = "unit `u` is gathered for the forward alone, and its parameter `b` is trained: freeze it, or gather the unit for \
                    the backward too";
    assert_eq!(refusal(&ModelSpec::new().unit(unit)), expected);
}
