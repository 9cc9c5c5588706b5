//! A build without devices: nothing lies on one.

use std::sync::Arc;
use std::time::Duration;

use hsdp_comm::{Contribution, Group, Scaling, Tag, World};
use hsdp_kernels::{Fold, HostBuffer};
use hsdp_sharding::{DType, Plan, UnitId, UnitLayout};

use crate::engine::fabric::Fabric;
use crate::engine::place::Place;
use crate::engine::reductions::UnitGradients;
use crate::engine::sums::Seen;
use crate::error::Error;
use crate::non_finite::Sighting;
use crate::placement::Placement;

/// Types without values, which stand for the parts that lie on a device.
macro_rules! absent {
    ($($name:ident)*) => {
        $(
            /// There is none in this build.
            #[derive(Debug)]
            pub(crate) enum $name {}
        )*
    };
}

absent!(DeviceAllReducing DeviceArriving DeviceFull DeviceScattering DeviceSeat DeviceSums DeviceUnsharded);

/// There is none in this build.
#[derive(Clone, Debug)]
pub(crate) enum DeviceShard {}

impl DeviceSeat {
    #[expect(clippy::unnecessary_wraps, reason = "as where there are devices")]
    pub(crate) fn of(placement: Placement, _: Duration, _: &Plan) -> Result<Option<Self>, Error> {
        let Placement::Host = placement;
        Ok(None)
    }

    pub(crate) fn updates_there(&self) -> bool {
        match *self {}
    }

    pub(crate) fn leaves_masters_here(&self) -> bool {
        match *self {}
    }

    pub(crate) fn connect(&self, _: &World, _: &[&Group]) -> Result<(), Error> {
        match *self {}
    }
}

impl DeviceSums {
    pub(crate) fn new(fabric: &Fabric, _: usize, _: u64) -> Result<Self, Error> {
        match *fabric.device.as_ref().expect("asked for where there is one") {}
    }

    pub(crate) fn len(&self) -> usize {
        match *self {}
    }

    pub(crate) fn begin(&mut self, _: &Fabric, _: u64) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn scatter(
        self,
        _: &Fabric,
        _: (Tag, Arc<UnitLayout>),
        _: Contribution,
        _: Fold,
    ) -> Result<DeviceScattering, Error> {
        match self {}
    }

    pub(crate) fn all_reduce(
        self,
        _: &Fabric,
        _: Tag,
        _: Scaling,
    ) -> Result<DeviceAllReducing, Error> {
        match self {}
    }

    pub(crate) fn fold_in(&mut self, _: &Fabric, _: (&Self, Fold), _: u64) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn to_host(&self, _: &Fabric, _: u64) -> Result<Vec<f32>, Error> {
        match *self {}
    }

    pub(crate) fn survey(_: &Fabric, all: &[&Self], _: u64) -> Result<Vec<Seen>, Error> {
        Ok(all.iter().map(|sums| match **sums {}).collect())
    }

    pub(crate) fn sighting(
        _: &Fabric,
        all: &[(UnitId, &Self)],
        _: u64,
    ) -> Result<Option<Sighting>, Error> {
        Ok(all.first().map(|(_, sums)| match **sums {}))
    }
}

impl DeviceScattering {
    pub(crate) fn is_complete(&self) -> bool {
        match *self {}
    }

    pub(crate) fn wait(self) -> Result<DeviceSums, Error> {
        match self {}
    }
}

impl DeviceAllReducing {
    pub(crate) fn is_complete(&self) -> bool {
        match *self {}
    }

    pub(crate) fn wait(self) -> Result<DeviceSums, Error> {
        match self {}
    }
}

impl DeviceShard {
    pub(crate) fn new(_: &Fabric, seat: &DeviceSeat, _: (Vec<f32>, DType)) -> Result<Self, Error> {
        match *seat {}
    }

    pub(crate) fn to_host(&self, _: &Fabric) -> Result<Arc<Vec<f32>>, Error> {
        match *self {}
    }

    pub(crate) fn update_on_host(
        &mut self,
        _: &Fabric,
        _: (&DeviceSums, u64),
        _: impl FnOnce(&mut [f32], &[f32]),
    ) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn copy_to(&self, _: &Fabric, _: usize, _: &mut [f32]) -> Result<(), Error> {
        match *self {}
    }
}

impl DeviceArriving {
    pub(crate) fn issue(
        _: &Fabric,
        _: (Tag, Arc<UnitLayout>),
        shard: &DeviceShard,
    ) -> Result<Self, Error> {
        match *shard {}
    }

    pub(crate) fn wait(self, _: &Fabric) -> Result<DeviceFull, Error> {
        match self {}
    }
}

impl DeviceFull {
    pub(crate) fn dtype(&self) -> DType {
        match *self {}
    }

    pub(crate) fn on_host(&self) -> &[HostBuffer] {
        match *self {}
    }
}

impl DeviceUnsharded {
    pub(crate) fn new(_: &Plan, seat: &DeviceSeat) -> Self {
        match *seat {}
    }

    pub(crate) fn add(
        &mut self,
        _: &Fabric,
        _: Place,
        _: (UnitId, &UnitGradients),
    ) -> Result<(), Error> {
        match *self {}
    }

    pub(crate) fn take(&mut self, _: &Plan, _: UnitId) -> UnitGradients {
        match *self {}
    }

    pub(crate) fn sighting(&self, _: &Fabric, _: u64) -> Result<Option<Sighting>, Error> {
        match *self {}
    }
}
