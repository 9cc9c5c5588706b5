//! Gathers of slices over the replicas, and the buffers that they fill.

use std::collections::BTreeMap;

use hsdp_comm::{Error as CommError, PendingParts, Tag, Ungathered};
use hsdp_kernels::HostBuffer;
use hsdp_kernels::cuda::DeviceBuffer;
use hsdp_sharding::UnitId;

use crate::error::Error;
use crate::state::context::{Context, ErrorSite};
use crate::state::shard::Shard;
use crate::state::store::{Located, There};

/// Gathers of slices that are under way or have failed, by unit. Each has the buffer of its unit's
/// shard that peers read in gathers of the unit.
#[derive(Debug, Default)]
pub(crate) struct SliceGathers(
    BTreeMap<UnitId, Located<LentInput<HostBuffer>, LentInput<DeviceBuffer>>>,
);

/// A buffer that a gather has.
#[derive(Debug)]
enum LentInput<B> {
    /// The gather is under way.
    UnderWay(PendingParts<B>),
    /// The gather was refused, or has failed.
    Failed(Ungathered<B>),
}

impl<B> LentInput<B> {
    fn of(called: Result<PendingParts<B>, Ungathered<B>>) -> Self {
        called.map_or_else(Self::Failed, Self::UnderWay)
    }

    fn error(&self) -> Option<CommError> {
        match self {
            Self::UnderWay(_) => None,
            Self::Failed(failed) => Some(failed.error.clone()),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::UnderWay(pending) => pending.is_complete(),
            Self::Failed(_) => true,
        }
    }

    /// Waits for the gather.
    fn wait(self) -> Result<B, Self> {
        match self {
            Self::UnderWay(pending) => pending.wait().map_err(Self::Failed),
            Self::Failed(_) => Err(self),
        }
    }

    /// Waits until the gather is over, and returns the buffer also if it has failed.
    fn reclaim(self) -> Result<B, Self> {
        match self.wait() {
            Err(Self::Failed(failed)) => failed.reclaim().map_err(Self::Failed),
            waited => waited,
        }
    }
}

impl SliceGathers {
    /// Issues the gather of a unit's slices into the buffer of its shard, which it takes.
    ///
    /// # Errors
    /// Errors of the operation. The buffer comes back when the gather is issued again.
    pub(crate) fn issue(
        &mut self,
        site: ErrorSite<'_>,
        tag: Tag,
        unit: UnitId,
        shard: &mut Shard,
    ) -> Result<(), Error> {
        self.take(unit, shard, LentInput::reclaim, LentInput::reclaim)?;
        let Context { all_reduce, .. } = site.context;
        let cuts = site.context.cuts(unit);
        let (lent, error) = match shard.lend().map_err(|error| site.device(error))? {
            Located::Host(buffer) => {
                let lent = LentInput::of(all_reduce.gather_parts(tag, cuts, buffer));
                let error = lent.error();
                (Located::Host(lent), error)
            }
            Located::Device(There { value, device }) => {
                let value = LentInput::of(all_reduce.gather_parts_on_device(tag, cuts, value));
                let error = value.error();
                (Located::Device(There { value, device }), error)
            }
        };
        self.0.insert(unit, lent);
        error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Waits for all gathers, and gives the buffers back to their shards, also those of gathers
    /// that have failed. Returns whether none has failed.
    ///
    /// # Errors
    /// If another thread still uses a buffer after the deadline of the world.
    pub(crate) fn settle(&mut self, shards: &mut [Shard]) -> Result<bool, Error> {
        let mut are_complete = true;
        while let Some((unit, _)) = self.0.first_key_value() {
            let unit = *unit;
            let shard = &mut shards[unit.index()];
            if self.wait(unit, shard).is_err() {
                are_complete = false;
                self.take(unit, shard, LentInput::reclaim, LentInput::reclaim)?;
            }
        }
        Ok(are_complete)
    }

    /// Returns whether the gather of a unit is complete or has failed.
    pub(crate) fn is_over(&self, unit: UnitId) -> bool {
        self.0.get(&unit).is_none_or(|lent| match lent {
            Located::Host(lent) => lent.is_over(),
            Located::Device(there) => there.value.is_over(),
        })
    }

    /// Waits for the gather of a unit, and gives the buffer back to its shard.
    ///
    /// # Errors
    /// Errors of the operation. The buffer comes back when the gather is issued again.
    pub(crate) fn wait(&mut self, unit: UnitId, shard: &mut Shard) -> Result<(), Error> {
        self.take(unit, shard, LentInput::wait, LentInput::wait)
    }

    /// Gives the buffer of a unit back to its shard, if a gather has it.
    fn take(
        &mut self,
        unit: UnitId,
        shard: &mut Shard,
        host: fn(LentInput<HostBuffer>) -> Result<HostBuffer, LentInput<HostBuffer>>,
        device: fn(LentInput<DeviceBuffer>) -> Result<DeviceBuffer, LentInput<DeviceBuffer>>,
    ) -> Result<(), Error> {
        let failed = match self.0.remove(&unit) {
            None => return Ok(()),
            Some(Located::Host(lent)) => match host(lent) {
                Ok(buffer) => {
                    shard.take_back(Located::Host(buffer));
                    return Ok(());
                }
                Err(failed) => Located::Host(failed),
            },
            Some(Located::Device(There { value, device: there })) => match device(value) {
                Ok(value) => {
                    shard.take_back(Located::Device(There { value, device: there }));
                    return Ok(());
                }
                Err(value) => Located::Device(There { value, device: there }),
            },
        };
        let error = match &failed {
            Located::Host(lent) => lent.error(),
            Located::Device(there) => there.value.error(),
        };
        self.0.insert(unit, failed);
        error.map_or(Ok(()), |error| Err(error.into()))
    }
}
