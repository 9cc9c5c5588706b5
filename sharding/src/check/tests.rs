use super::*;

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
