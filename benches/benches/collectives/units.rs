//! The runtime's own collectives: a unit of one parameter gathered, its gradient reduced, partials
//! all-reduced.

use std::mem;
use std::sync::Arc;

use half::bf16;
use hsdp_comm::{Accumulator, Contribution, Error, Group, Scaling, Tag};
use hsdp_kernels::{Fold, HostBuffer, SharedBuffer, Wire, cast};
use hsdp_sharding::{ALIGNMENT, DType, Param, Unit, UnitLayout};

use crate::case::{Bus, Case, Collective, settled};
use crate::place::{Place, Wrong, check};

pub(crate) const ALL: [Collective; 6] = [
    of_unit("unit_gather_f32", Bus::OtherParts, size_of::<f32>(), |place| {
        gather(place, DType::F32)
    }),
    of_unit("unit_gather_bf16", Bus::OtherParts, size_of::<bf16>(), |place| {
        gather(place, DType::BF16)
    }),
    of_unit("unit_reduce_f32", Bus::OtherParts, size_of::<f32>(), |place| reduce(place, Wire::F32)),
    of_unit("unit_reduce_bf16", Bus::OtherParts, size_of::<f32>(), |place| {
        reduce(place, Wire::BF16)
    }),
    of_unit("scaled_all_reduce_f32", Bus::ThereAndBack, size_of::<f32>(), |place| {
        all_reduce(place, Wire::F32)
    }),
    of_unit("scaled_all_reduce_bf16", Bus::ThereAndBack, size_of::<f32>(), |place| {
        all_reduce(place, Wire::BF16)
    }),
];

const fn of_unit(
    name: &'static str,
    bus: Bus,
    element: usize,
    prepare: fn(Place) -> Box<dyn Case>,
) -> Collective {
    Collective { name, bus, element, grain: ALIGNMENT, prepare }
}

fn layout(place: Place) -> Arc<UnitLayout> {
    let unit = Unit::new("unit").param(Param::new("weight", [place.whole()]));
    Arc::new(UnitLayout::new(&unit, place.ranks).expect("each rank has a part"))
}

/// Shards become a parameter.
struct Gather {
    place: Place,
    layout: Arc<UnitLayout>,
    shard: SharedBuffer,
    targets: Vec<HostBuffer>,
}

fn gather(place: Place, dtype: DType) -> Box<dyn Case> {
    let zeros = |len| HostBuffer::zeros(dtype, len).expect("a dtype of parameters");
    let target = zeros(place.whole());
    let mut shard = zeros(place.part);
    cast(shard.values_mut(), &place.brings(place.part));
    let shard = SharedBuffer::from(shard);
    Box::new(Gather { place, layout: layout(place), shard, targets: vec![target] })
}

impl Case for Gather {
    fn call(&mut self, group: &Group) -> Result<(), Error> {
        let layout = Arc::clone(&self.layout);
        let shard = self.shard.clone();
        let targets = mem::take(&mut self.targets);
        self.targets = settled(group.gather_unit(Tag::default(), layout, shard, targets))?;
        Ok(())
    }

    fn check(&self) -> Result<(), Wrong> {
        let gathered = self.targets.first().map(|it| it.values().to_f32()).unwrap_or_default();
        check(&gathered, |index| self.place.gathered(index))
    }

    fn calm(&mut self) {}
}

/// A gradient is summed into the partials of its owners.
struct Reduce {
    place: Place,
    layout: Arc<UnitLayout>,
    gradient: Arc<Vec<f32>>,
    wire: Wire,
    partial: Vec<f32>,
}

fn reduce(place: Place, wire: Wire) -> Box<dyn Case> {
    let gradient = Arc::new(place.brings(place.whole()));
    let partial = vec![0.0; place.part];
    Box::new(Reduce { place, layout: layout(place), gradient, wire, partial })
}

impl Case for Reduce {
    fn call(&mut self, group: &Group) -> Result<(), Error> {
        let gradients = vec![Some(Arc::clone(&self.gradient) as _)];
        let contribution = Contribution { gradients, scaling: Scaling::on(self.wire) };
        let accumulator =
            Accumulator { partial: mem::take(&mut self.partial), fold: Fold::Replace };
        let layout = Arc::clone(&self.layout);
        let reduced = group.reduce_unit(Tag::default(), layout, contribution, accumulator);
        self.partial = settled(reduced)?.partial;
        Ok(())
    }

    fn check(&self) -> Result<(), Wrong> {
        let start = self.place.rank * self.place.part;
        check(&self.partial, |index| self.place.total(start + index))
    }

    fn calm(&mut self) {}
}

/// Partials become their sum.
struct AllReduce {
    place: Place,
    values: Vec<f32>,
    wire: Wire,
}

fn all_reduce(place: Place, wire: Wire) -> Box<dyn Case> {
    Box::new(AllReduce { place, values: place.brings(place.whole()), wire })
}

impl Case for AllReduce {
    fn call(&mut self, group: &Group) -> Result<(), Error> {
        let values = mem::take(&mut self.values);
        let scaling = Scaling::on(self.wire);
        self.values = settled(group.all_reduce_scaled(Tag::default(), values, scaling))?;
        Ok(())
    }

    fn check(&self) -> Result<(), Wrong> {
        check(&self.values, |index| self.place.total(index))
    }

    fn calm(&mut self) {
        self.values.fill(0.0);
    }
}
