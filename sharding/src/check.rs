//! Checks of a model's description.

use std::collections::HashMap;

use crate::{
    AfterForward, BufferProblem, DType, Error, Granularity, ModelSpec, Param, Role, State,
    StorageProblem, TieProblem, Unit,
};

/// The largest unit, and the largest model, that a plan accepts, in elements with padding: 2^48.
/// Every count of bytes of a microbatch then fits in a u64.
pub(crate) const MAX_ELEMENTS: u64 = 1 << 48;

impl ModelSpec {
    /// Checks the description. [`Plan::new`](crate::Plan::new) calls it.
    ///
    /// # Errors
    /// - [`Error::EmptyModel`] if the model has no unit, [`Error::EmptyUnit`] if a unit has no
    ///   parameter.
    /// - [`Error::DuplicateName`] if two parameters, two buffers or two units have the same name.
    /// - [`Error::InvalidBuffer`] if a buffer has the name of a parameter, is marked as trainable,
    ///   stored in another dtype, or to be cut.
    /// - [`Error::DuplicateSetting`] if a setting is stated twice, also with one value.
    /// - [`Error::ZeroDim`] if a dim of a parameter has size 0, [`Error::InvalidRows`] if it asks
    ///   for pieces of 0 rows, or for rows without having a dim, [`Error::InvalidBlocks`] if it
    ///   asks for blocks of 0 elements.
    /// - [`Error::InvalidMatrices`] if a parameter is not the stack of matrices that it declares,
    ///   [`Error::NoMatrices`] if it is updated by Muon and has none.
    /// - [`Error::InvalidState`] if a parameter has more than 1024 f32 of state an element, or
    ///   blocks of 0 elements, [`Error::TooLarge`] if owners keep more than 2^48 f32 in all.
    /// - [`Error::TrainedForwardOnly`] if a unit for the forward alone has a trainable parameter.
    /// - [`Error::UnitDType`] if a unit computes in another dtype than f32, f16 and bf16.
    /// - [`Error::InvalidStorage`] if a parameter is stored in another dtype than f16 and bf16, is
    ///   trainable, or is not stored like the other frozen parameters of its unit.
    /// - [`Error::InvalidTie`] if an alias is taken, or does not lead to a parameter.
    pub fn validate(&self) -> Result<(), Error> {
        if self.units().is_empty() {
            return Err(Error::EmptyModel);
        }
        self.check_unit_names()?;
        self.check_param_names()?;
        self.check_buffer_names()?;
        self.check_statistics()?;
        self.check_settings()?;
        self.units().iter().try_for_each(Unit::check)?;
        self.check_owned()?;
        self.check_ties()
    }

    fn check_unit_names(&self) -> Result<(), Error> {
        let mut owners = HashMap::new();
        for (second, unit) in self.units().iter().enumerate() {
            if let Some(first) = owners.insert(unit.name.as_str(), second) {
                return Err(duplicate("unit", &unit.name, first, second));
            }
        }
        Ok(())
    }

    fn check_param_names(&self) -> Result<(), Error> {
        for (second, (id, param)) in self.params().enumerate() {
            let Some(owner) = self.declared(&param.name).filter(|owner| *owner != id) else {
                continue;
            };
            let first = self.params().take_while(|(earlier, _)| *earlier != owner).count();
            return Err(duplicate("parameter", &param.name, first, second));
        }
        Ok(())
    }

    fn check_buffer_names(&self) -> Result<(), Error> {
        for (second, (id, buffer)) in self.buffers().enumerate() {
            if self.declared(&buffer.name).is_some() {
                let buffer = buffer.name.clone();
                return Err(Error::InvalidBuffer {
                    buffer,
                    problem: BufferProblem::NameOfParameter,
                });
            }
            let owner = self.find_buffer(&buffer.name);
            if let Some(owner) = owner.filter(|owner| *owner != id) {
                let first = self.buffers().take_while(|(earlier, _)| *earlier != owner).count();
                return Err(duplicate("buffer", &buffer.name, first, second));
            }
        }
        Ok(())
    }

    fn check_statistics(&self) -> Result<(), Error> {
        let mut owners = HashMap::new();
        let all = self.units().iter().flat_map(|unit| &unit.statistics);
        for (second, statistics) in all.enumerate() {
            let name = statistics.name.as_str();
            if statistics.channels == 0 {
                return Err(Error::NoChannels { statistics: name.to_owned() });
            }
            if let Some(first) = owners.insert(name, second) {
                return Err(duplicate("statistic", name, first, second));
            }
        }
        Ok(())
    }

    fn check_settings(&self) -> Result<(), Error> {
        let mut stated = HashMap::new();
        for (name, value) in self.settings() {
            if let Some(first) = stated.insert(name, value) {
                let values = [first, value].map(str::to_owned);
                return Err(Error::DuplicateSetting { name: name.to_owned(), values });
            }
        }
        Ok(())
    }

    /// Checks that the bytes of all owned states, and of all buffers, can be counted.
    fn check_owned(&self) -> Result<(), Error> {
        let elements = self.buffer_numel().0;
        if elements > MAX_ELEMENTS {
            let what = "the buffers of the model".to_owned();
            return Err(Error::TooLarge { what, elements, limit: MAX_ELEMENTS });
        }
        let elements = self.params().fold(0u64, |sum, (_, param)| match param.state {
            State::Owned(words) => sum.saturating_add(words as u64),
            _ => sum,
        });
        if elements > MAX_ELEMENTS {
            let what = "the optimizer state of all owners".to_owned();
            return Err(Error::TooLarge { what, elements, limit: MAX_ELEMENTS });
        }
        Ok(())
    }

    fn check_ties(&self) -> Result<(), Error> {
        for (place, (alias, target)) in self.ties().enumerate() {
            if let Some(problem) = self.tie_problem(place, alias, target) {
                let alias = alias.to_owned();
                let target = target.to_owned();
                return Err(Error::InvalidTie { alias, target, problem });
            }
        }
        Ok(())
    }

    fn tie_problem(&self, place: usize, alias: &str, target: &str) -> Option<TieProblem> {
        let is_alias = |name: &str| self.ties().any(|(alias, _)| alias == name);
        if alias == target {
            Some(TieProblem::Itself)
        } else if self.declared(alias).is_some() {
            Some(TieProblem::AliasIsParameter)
        } else if self.find_buffer(alias).is_some() {
            Some(TieProblem::AliasIsBuffer)
        } else if self.ties().take(place).any(|(earlier, _)| earlier == alias) {
            Some(TieProblem::AliasIsTaken)
        } else if self.declared(target).is_some() {
            None
        } else if is_alias(target) {
            Some(TieProblem::TargetIsAlias)
        } else {
            Some(TieProblem::UnknownTarget)
        }
    }
}

impl Unit {
    /// Checks everything that a layout needs, except the size.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.params.is_empty() {
            return Err(Error::EmptyUnit { unit: self.name.clone() });
        }
        let trained = self.params.iter().find(|param| param.role == Role::Trainable);
        if let (AfterForward::Discard, Some(param)) = (self.after_forward, trained) {
            let unit = self.name.clone();
            let param = param.name.clone();
            return Err(Error::TrainedForwardOnly { unit, param });
        }
        if let Some(dtype) = self.compute_dtype.filter(|dtype| !dtype.is_of_training()) {
            return Err(Error::UnitDType { unit: self.name.clone(), dtype });
        }
        self.params.iter().try_for_each(Param::check)?;
        self.buffers.iter().try_for_each(Param::check_buffer)?;
        if let Some(buffer) = self.params.iter().find(|param| param.buffer.is_some()) {
            let problem = BufferProblem::AmongParameters;
            return Err(Error::InvalidBuffer { buffer: buffer.name.clone(), problem });
        }
        self.check_storage()
    }

    /// Checks that all frozen parameters are stored alike: the layout has one region for them.
    fn check_storage(&self) -> Result<(), Error> {
        let frozen = || self.params.iter().filter(|param| param.role == Role::Frozen);
        let Some(stored) = frozen().find(|param| param.stored.is_some()) else { return Ok(()) };
        match frozen().find(|param| param.stored != stored.stored) {
            None => Ok(()),
            Some(other) => {
                stored.check_stored(|_| Some(StorageProblem::Beside(other.name.clone())))
            }
        }
    }
}

impl Param {
    fn check(&self) -> Result<(), Error> {
        let param = || self.name.clone();
        let shape = || self.shape.clone();
        self.check_dims()?;
        self.check_stored(|dtype| match (self.role, dtype) {
            (Role::Trainable, _) => Some(StorageProblem::Trainable),
            (Role::Frozen, DType::F16 | DType::BF16) => None,
            (Role::Frozen, _) => Some(StorageProblem::DType),
        })?;
        match self.granularity {
            Granularity::Rows(rows) if rows == 0 || self.shape.is_empty() => {
                Err(Error::InvalidRows { param: param(), shape: shape(), rows })
            }
            Granularity::Blocks(0) => Err(Error::InvalidBlocks { param: param() }),
            Granularity::Rows(_) | Granularity::Blocks(_) | Granularity::Element => Ok(()),
        }?;
        self.check_matrices()?;
        self.check_state()
    }

    fn check_dims(&self) -> Result<(), Error> {
        let Some(dim) = self.shape.iter().position(|&size| size == 0) else { return Ok(()) };
        Err(Error::ZeroDim { param: self.name.clone(), shape: self.shape.clone(), dim })
    }

    /// Checks a buffer, which has no layout.
    fn check_buffer(&self) -> Result<(), Error> {
        self.check_dims()?;
        let is_cut = self.granularity != Granularity::Element || self.view.is_some();
        let problem = match self.role {
            _ if self.buffer.is_none() => BufferProblem::WithoutRule,
            Role::Trainable => BufferProblem::Trainable,
            Role::Frozen if self.stored.is_some() => BufferProblem::Stored,
            Role::Frozen if is_cut => BufferProblem::Cut,
            Role::Frozen => return Ok(()),
        };
        Err(Error::InvalidBuffer { buffer: self.name.clone(), problem })
    }

    /// Checks that a declared view has all elements. No product of sizes above 0 that saturates is
    /// that of a layout.
    fn check_matrices(&self) -> Result<(), Error> {
        match self.view {
            Some(matrices) if matrices.numel() != self.numel() => {
                let param = self.name.clone();
                let shape = self.shape.clone();
                Err(Error::InvalidMatrices { param, shape, matrices })
            }
            _ => Ok(()),
        }
    }

    fn check_state(&self) -> Result<(), Error> {
        let param = || self.name.clone();
        let state = self.state;
        if !state.is_valid() {
            return Err(Error::InvalidState { param: param(), state });
        }
        match (self.role, state, self.as_matrices()) {
            (Role::Trainable, State::Muon, None) => Err(self.no_matrices()),
            _ => Ok(()),
        }
    }

    /// The error for a parameter without matrices of which whole matrices are needed.
    pub(crate) fn no_matrices(&self) -> Error {
        Error::NoMatrices { param: self.name.clone(), shape: self.shape.clone() }
    }

    /// Checks that a parameter that is stored in the compute dtype of its unit is gathered in it.
    pub(crate) fn check_gathered_in(&self, compute: DType) -> Result<(), Error> {
        self.check_stored(|dtype| (dtype != compute).then_some(StorageProblem::Gathered(compute)))
    }

    fn check_stored(
        &self,
        problem: impl FnOnce(DType) -> Option<StorageProblem>,
    ) -> Result<(), Error> {
        let Some(dtype) = self.stored else { return Ok(()) };
        match problem(dtype) {
            None => Ok(()),
            Some(problem) => {
                Err(Error::InvalidStorage { param: self.name.clone(), dtype, problem })
            }
        }
    }
}

fn duplicate(what: &'static str, name: &str, first: usize, second: usize) -> Error {
    Error::DuplicateName { what, name: name.to_owned(), first, second }
}

#[cfg(test)]
mod tests {
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
    fn a_buffer_has_a_name_of_its_own_and_nothing_of_a_parameter() {
        let buffer = || Param::new("mean", [4]).buffer();
        let spec = |other: Param| model([weight("a"), buffer(), other]);
        assert_eq!(spec(Param::new("var", [4]).averaged_buffer()).validate(), Ok(()));
        let refused = [
            (spec(buffer()), "two buffers are called `mean`: number 0 and number 1 of the model"),
            (spec(weight("mean")), "buffer `mean`: a parameter has the same name"),
            (
                spec(weight("b").buffer().rows(2)),
                "buffer `b`: it is to be cut, or seen as matrices, and a buffer is whole on each rank",
            ),
            (
                spec(weight("b").buffer().stored_in(DType::BF16)),
                "buffer `b`: it is to be stored in another dtype, and buffers are in f32",
            ),
            (
                spec(Param { role: Role::Trainable, ..weight("b").buffer() }),
                "buffer `b`: it is marked as trainable, and no gradient reaches a buffer",
            ),
            (spec(Param::new("b", [0]).buffer()), "parameter `b` of shape [0]: dim 0 has size 0"),
            (
                model([weight("a"), buffer()]).tie("mean", "a"),
                "tie `mean` -> `a`: a buffer has the alias as its own name",
            ),
            (
                model([weight("a"), buffer()]).tie("other", "mean"),
                "tie `other` -> `mean`: no parameter has the target's name",
            ),
        ];
        for (spec, expected) in refused {
            assert_eq!(refusal(&spec), expected);
        }
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
        let expected =
            format!("parameter `a` of shape [4, 3] cannot be cut into pieces of 0 {rest}");
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
            let alias = alias.to_owned();
            let target = target.to_owned();
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
}
