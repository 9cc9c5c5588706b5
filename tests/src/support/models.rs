//! Small models.

use std::sync::Arc;

use hsdp::{DType, ModelSpec, Param, ShardedModel, Unit, UnitId};
use hsdp_sharding::Role;

/// A rank's shards, by unit.
pub type Shards = Vec<Arc<Vec<f32>>>;

/// The shards of a model on the host, as they lie there.
///
/// # Panics
/// If it lies on a device, and that fails.
#[must_use]
pub fn shards(model: &ShardedModel) -> Shards {
    let shard = |unit| model.shard(unit).expect("it lies on the host");
    model.plan().spec().unit_ids().map(shard).collect()
}

/// Three units of odd shapes, `first`, `second` and `third`, each with a `weight` and a `bias`.
#[must_use]
pub fn three_units() -> ModelSpec {
    ModelSpec::new()
        .unit(layer("first", [13, 7]))
        .unit(layer("second", [5, 9]))
        .unit(layer("third", [31, 3]))
}

/// The same, of which the second is kept from its forward to its backward.
#[must_use]
pub fn keeping_the_second() -> ModelSpec {
    ModelSpec::new()
        .unit(layer("first", [13, 7]))
        .unit(layer("second", [5, 9]).keep())
        .unit(layer("third", [31, 3]))
}

/// The same, of which the second is frozen as a whole and the third in part.
#[must_use]
pub fn partly_frozen() -> ModelSpec {
    let second = Unit::new("second").param(Param::new("second.weight", [5, 9]).frozen());
    let third = Unit::new("third")
        .param(Param::new("third.weight", [31, 3]).frozen())
        .param(Param::new("third.bias", [31]));
    ModelSpec::new().unit(layer("first", [13, 7])).unit(second).unit(third)
}

/// Declares these compute dtypes of the units, in order and again from the start. `None` stands for
/// that of the model.
#[must_use]
pub fn computing_in(spec: &ModelSpec, dtypes: &[Option<DType>]) -> ModelSpec {
    let units = spec.units().iter().cloned().zip(dtypes.iter().cycle());
    let unit =
        |(unit, dtype): (Unit, &Option<DType>)| dtype.iter().copied().fold(unit, Unit::compute_in);
    units.map(unit).fold(ModelSpec::new(), ModelSpec::unit)
}

/// Has the frozen parameters of all units stored in this dtype, without f32 masters.
#[must_use]
pub fn storing_frozen(spec: &ModelSpec, dtype: DType) -> ModelSpec {
    let unit = |unit: &Unit| {
        let mut unit = unit.clone();
        for param in unit.params.iter_mut().filter(|param| param.role == Role::Frozen) {
            param.stored = Some(dtype);
        }
        unit
    };
    spec.units().iter().map(unit).fold(ModelSpec::new(), ModelSpec::unit)
}

/// One unit with one parameter, `w`, of `elements` elements.
#[must_use]
pub fn one_parameter(elements: usize) -> ModelSpec {
    ModelSpec::new().unit(Unit::new("unit").param(Param::new("w", [elements])))
}

/// A unit with a weight of this shape, and a bias of as many elements as it has rows.
#[must_use]
pub fn layer(name: &str, shape: [usize; 2]) -> Unit {
    Unit::new(name)
        .param(Param::new(format!("{name}.weight"), shape))
        .param(Param::new(format!("{name}.bias"), [shape[0]]))
}

/// The unit at this place of the forward.
#[must_use]
pub fn unit(index: usize) -> UnitId {
    UnitId::new(index)
}
