//! The model: its units in declared order, and its ties.

use std::collections::HashMap;
use std::fmt;
use std::ops::Index;

use serde::{Deserialize, Serialize};

use super::{AfterForward, BufferRule, Granularity, Param, Role, State, Unit};
use crate::ElemCount;

/// The id of a unit: its place in the declared order, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct UnitId(u32);

impl UnitId {
    /// The id of the unit at this place, from 0.
    ///
    /// # Panics
    /// If `index` is above `u32::MAX`.
    #[must_use]
    pub const fn new(index: usize) -> Self {
        assert!(index <= u32::MAX as usize, "a model has at most 4294967296 units");
        #[expect(clippy::cast_possible_truncation, reason = "checked in the line above")]
        Self(index as u32)
    }

    /// Its place as a `usize`, for indexing.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Its place as a `u32`, as descriptors hold it.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for UnitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The id of a parameter: its unit, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId {
    /// The unit that holds it.
    pub unit: UnitId,
    /// Its place in [`Unit::params`].
    pub index: usize,
}

/// The id of a buffer: its unit, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId {
    /// The unit that declares it.
    pub unit: UnitId,
    /// Its place in [`Unit::buffers`].
    pub index: usize,
}

/// The description of a model: its units in the order of the forward, and aliases for parameters
/// that are used twice.
///
/// Building never fails. [`validate`](Self::validate), which [`Plan::new`](crate::Plan::new) calls,
/// reports the mistakes.
///
/// ```
/// use hsdp_sharding::{ModelSpec, Param, Unit};
/// let spec = ModelSpec::new()
///     .unit(Unit::new("embedding").param(Param::new("wte", [50257, 768])))
///     .unit(Unit::new("norm").param(Param::new("norm.weight", [768])))
///     .tie("head.weight", "wte");
/// let id = spec.find("head.weight").unwrap();
/// assert_eq!(spec[id].name, "wte");
/// assert_eq!(spec[id.unit].name, "embedding");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSpec {
    units: Vec<Unit>,
    ties: Vec<(String, String)>,
    /// The first parameter of each name. The map is never iterated, so its order has no effect.
    names: HashMap<String, ParamId>,
    /// The first buffer of each name. The map is never iterated.
    buffer_names: HashMap<String, BufferId>,
    averages: usize,
    settings: Vec<(String, String)>,
}

impl ModelSpec {
    /// A model without units.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A model whose units are made by size. Parameters are taken in the given order, and a new
    /// unit begins where the present one would exceed `max` elements. A parameter with more than
    /// `max` elements is a unit of its own. The units are called `unit.0`, `unit.1`, ...
    #[must_use]
    pub fn wrapped(params: impl IntoIterator<Item = Param>, max: ElemCount) -> Self {
        let mut spec = Self::new();
        let mut open = Unit::new("unit.0");
        for param in params {
            let numel = open.numel().0.saturating_add(param.numel() as u64);
            if param.buffer.is_none() && !open.params.is_empty() && numel > max.0 {
                let next = Unit::new(format!("unit.{}", spec.units.len() + 1));
                spec = spec.unit(std::mem::replace(&mut open, next));
            }
            open = open.param(param);
        }
        if open.params.is_empty() && open.buffers.is_empty() { spec } else { spec.unit(open) }
    }

    /// Appends a unit, which becomes the last of the forward.
    ///
    /// # Panics
    /// If the model has 2^32 units already.
    #[must_use]
    pub fn unit(mut self, unit: Unit) -> Self {
        let id = UnitId::new(self.units.len());
        for (index, param) in unit.params.iter().enumerate() {
            self.names.entry(param.name.clone()).or_insert(ParamId { unit: id, index });
        }
        for (index, buffer) in unit.buffers.iter().enumerate() {
            let first = BufferId { unit: id, index };
            self.buffer_names.entry(buffer.name.clone()).or_insert(first);
        }
        self.units.push(unit);
        self
    }

    /// Makes `alias` another name for the parameter `target`. The parameter is stored once, in the
    /// unit that declares it.
    #[must_use]
    pub fn tie(mut self, alias: impl Into<String>, target: impl Into<String>) -> Self {
        self.ties.push((alias.into(), target.into()));
        self
    }

    /// States a setting of the computation that no parameter shows, such as the number of heads, or
    /// a number of a file that each rank reads. Each name is stated once. Ranks compare the
    /// settings when they make the model, and checkpoints keep them. A plan depends on them by its
    /// fingerprint alone.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl fmt::Display) -> Self {
        self.settings.push((name.into(), value.to_string()));
        self
    }

    /// Sets the [state](Param::state) that the optimizer keeps for each trainable parameter. It
    /// affects the plan's memory and traffic, and blocks of 8-bit state also the
    /// [slices](crate::Plan::slice) of replicas and the fingerprint.
    #[must_use]
    pub fn updated_by(mut self, state: impl Fn(&Param) -> State) -> Self {
        let params = self.units.iter_mut().flat_map(|unit| &mut unit.params);
        for param in params.filter(|param| param.role == Role::Trainable) {
            param.state = state(param);
        }
        self
    }

    /// Plans one more moving average of the trainable parameters and of the buffers, which takes an
    /// f32 for each element of a rank's shard and of each buffer. It affects
    /// predictions only.
    #[must_use]
    pub fn averaged(self) -> Self {
        Self { averages: self.averages + 1, ..self }
    }

    /// The number of moving averages of the trainable parameters and of the buffers.
    #[must_use]
    pub const fn averages(&self) -> usize {
        self.averages
    }

    /// Lets all trainable parameters be cut only between [blocks](Param::blocks) of this number of
    /// elements.
    #[must_use]
    pub fn in_blocks(mut self, elements: usize) -> Self {
        let params = self.units.iter_mut().flat_map(|unit| &mut unit.params);
        for param in params.filter(|param| param.role == Role::Trainable) {
            param.granularity = Granularity::Blocks(elements);
        }
        self
    }

    /// Keeps the full parameters of all units from their forward to their backward, except those
    /// that are gathered for the forward alone.
    #[must_use]
    pub fn all_kept(mut self) -> Self {
        let resharded = |unit: &&mut Unit| unit.after_forward == AfterForward::Reshard;
        self.units
            .iter_mut()
            .filter(resharded)
            .for_each(|it| it.after_forward = AfterForward::Keep);
        self
    }

    /// Its units, in declared order.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// The ids of its units, in declared order.
    pub fn unit_ids(&self) -> impl DoubleEndedIterator<Item = UnitId> + ExactSizeIterator + use<> {
        (0..self.units.len()).map(UnitId::new)
    }

    /// Its parameters with their ids, each once, unit by unit in declared order.
    pub fn params(&self) -> impl Iterator<Item = (ParamId, &Param)> {
        self.unit_ids().zip(&self.units).flat_map(|(unit, declared)| {
            let id = move |index| ParamId { unit, index };
            declared.params.iter().enumerate().map(move |(index, param)| (id(index), param))
        })
    }

    /// Returns its buffers with their ids, unit by unit in declared order.
    pub fn buffers(&self) -> impl Iterator<Item = (BufferId, &Param)> {
        self.unit_ids().zip(&self.units).flat_map(|(unit, declared)| {
            let id = move |index| BufferId { unit, index };
            declared.buffers.iter().enumerate().map(move |(index, buffer)| (id(index), buffer))
        })
    }

    /// Returns its buffers that have a rule, in declared order.
    pub fn buffers_of(&self, rule: BufferRule) -> impl Iterator<Item = &Param> {
        let all = self.buffers().map(|(_, buffer)| buffer);
        all.filter(move |buffer| buffer.buffer == Some(rule))
    }

    /// Returns its parameters and then its buffers: all tensors of a model that are saved, exported
    /// and imported.
    pub fn tensors(&self) -> impl Iterator<Item = &Param> {
        let params = self.params().map(|(_, param)| param);
        params.chain(self.buffers().map(|(_, buffer)| buffer))
    }

    /// Returns the number of elements of all its buffers. Saturates at `u64::MAX`.
    #[must_use]
    pub fn buffer_numel(&self) -> ElemCount {
        let numel = |(_, buffer): (BufferId, &Param)| buffer.numel() as u64;
        ElemCount(self.buffers().map(numel).fold(0u64, u64::saturating_add))
    }

    /// Its ties, `(alias, target)`, in declared order.
    pub fn ties(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.ties.iter().map(|(alias, target)| (alias.as_str(), target.as_str()))
    }

    /// Returns the stated settings, `(name, value)`, in declared order.
    pub fn settings(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The id of the parameter with this name or alias; `None` if there is none.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ParamId> {
        let target = || self.ties().find(|(alias, _)| *alias == name).map(|(_, target)| target);
        self.declared(name).or_else(|| self.declared(target()?))
    }

    /// Returns the id of the buffer with this name; `None` if there is none. Ties name parameters
    /// alone.
    #[must_use]
    pub fn find_buffer(&self, name: &str) -> Option<BufferId> {
        self.buffer_names.get(name).copied()
    }

    /// The number of elements of all its parameters, each counted once, without padding. Saturates
    /// at `u64::MAX`.
    #[must_use]
    pub fn numel(&self) -> ElemCount {
        ElemCount(self.units.iter().fold(0u64, |total, unit| total.saturating_add(unit.numel().0)))
    }

    /// The first parameter that is declared under this name. Aliases are ignored.
    pub(crate) fn declared(&self, name: &str) -> Option<ParamId> {
        self.names.get(name).copied()
    }
}

/// The unit with this id.
///
/// # Panics
/// If the model has no such unit.
impl Index<UnitId> for ModelSpec {
    type Output = Unit;

    fn index(&self, id: UnitId) -> &Unit {
        &self.units[id.index()]
    }
}

/// The buffer with this id.
///
/// # Panics
/// If the model has no such buffer.
impl Index<BufferId> for ModelSpec {
    type Output = Param;

    fn index(&self, id: BufferId) -> &Param {
        &self[id.unit].buffers[id.index]
    }
}

/// The parameter with this id.
///
/// # Panics
/// If the model has no such parameter.
impl Index<ParamId> for ModelSpec {
    type Output = Param;

    fn index(&self, id: ParamId) -> &Param {
        &self[id.unit].params[id.index]
    }
}
