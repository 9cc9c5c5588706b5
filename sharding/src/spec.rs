//! The description of a model: its parameters, and the units in which they are gathered.

mod model;
mod param;
mod state;
mod unit;

pub use self::model::{BufferId, ModelSpec, ParamId, UnitId};
pub use self::param::{BufferRule, Granularity, Param, Role};
pub use self::state::{Matrices, State};
pub use self::unit::{AfterForward, Phase, Statistics, Unit};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElemCount, Error};

    fn weight(name: &str) -> Param {
        Param::new(name, [4, 3])
    }

    fn model(params: impl IntoIterator<Item = Param>) -> ModelSpec {
        ModelSpec::new().unit(params.into_iter().fold(Unit::new("only"), Unit::param))
    }

    #[test]
    fn buffers_are_numbered_apart_from_parameters() {
        let mean = || Param::new("mean", [3]).buffer();
        let spec = ModelSpec::new().unit(Unit::new("first").param(weight("a")).param(mean())).unit(
            Unit::new("second").param(Param::new("own", [2]).averaged_buffer()).param(weight("b")),
        );
        let id = |unit, index| BufferId { unit: UnitId::new(unit), index };
        assert_eq!(spec.find_buffer("mean"), Some(id(0, 0)));
        assert_eq!(spec.find_buffer("own"), Some(id(1, 0)));
        assert_eq!((spec.find("mean"), spec.find_buffer("a")), (None, None));
        let names: Vec<_> = spec.tensors().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "mean", "own"]);
        assert_eq!((spec.numel(), spec.buffer_numel()), (ElemCount(24), ElemCount(5)));
        // A model that is made by size keeps each of them, and they take no room in a unit.
        let params = [weight("a"), mean(), weight("b")];
        let wrapped = ModelSpec::wrapped(params, ElemCount(12));
        assert_eq!(wrapped.units().len(), 2);
        assert_eq!(wrapped.find_buffer("mean"), Some(id(0, 0)));
    }

    #[test]
    fn parameters_are_numbered_unit_by_unit() {
        let spec = ModelSpec::new()
            .unit(Unit::new("first").param(weight("a")).param(weight("b")))
            .unit(Unit::new("second").param(weight("c")));
        let numbered: Vec<_> = spec
            .params()
            .map(|(id, param)| (id.unit.index(), id.index, param.name.as_str()))
            .collect();
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
}
