//! A rank's sums of one unit's gradients, wherever its part of the model lies, and their reductions.

pub(crate) mod device;

use std::borrow::Cow;
use std::sync::Arc;

use hsdp_comm::{Accumulator, Contribution, NonFiniteAt, Pending, Reduced, Scaling, Tag};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Divisor, Fold, first_non_finite, settle, squared_norm};
use hsdp_sharding::{UnitId, UnitLayout};

use self::device::{DeviceAllReducing, DeviceScattering, DeviceSums};
use crate::error::Error;
use crate::state::context::Context;
use crate::state::sighting::Sighting;

/// Sums in f32.
#[derive(Debug)]
pub(crate) enum Sums {
    Host(Vec<f32>),
    Device(DeviceSums),
}

/// No sums yet.
impl Default for Sums {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

/// The norm of a unit's finished sums, and their first element that is not finite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) squared_norm: f64,
    /// The index of the first element that is not finite. The host searches for it only where the norm is not finite.
    pub(crate) first_non_finite: Option<usize>,
}

impl Sums {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(sums) => sums.len(),
        }
    }

    /// These sums, if they have length `len`, or new ones, where the model lies.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn sized(
        self,
        context: &Context,
        len: usize,
        (step, unit): (u64, UnitId),
    ) -> Result<Self, Error> {
        match self {
            Self::Device(sums) if sums.len() == len => Ok(Self::Device(sums)),
            _ if context.device.is_some() => Ok(Self::Device(DeviceSums::new(context, len, step)?)),
            Self::Host(values) => {
                let values = sized(values, len, Category::Partial);
                let no_memory = |error| context.site("reduction", step).memory(unit, error);
                values.map(Self::Host).map_err(no_memory)
            }
            Self::Device(_) => unreachable!("a model on the host has its sums there"),
        }
    }

    /// Prepares the sums for the first reduction of a step.
    pub(crate) fn begin(&mut self, context: &Context, step: u64) -> Result<(), Error> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(sums) => sums.begin(context, step),
        }
    }

    /// Issues the reduce-scatter of a microbatch into these sums.
    pub(crate) fn scatter(
        self,
        context: &Context,
        (tag, layout): (Tag, Arc<UnitLayout>),
        contribution: Contribution,
        fold: Fold,
    ) -> Result<Scattering, Error> {
        Ok(match self {
            Self::Host(partial) => {
                let accumulator = Accumulator { partial, fold };
                let reduce = &context.reduce;
                Scattering::Host(reduce.reduce_unit(tag, layout, contribution, accumulator)?)
            }
            Self::Device(sums) => {
                Scattering::Device(sums.scatter(context, (tag, layout), contribution, fold)?)
            }
        })
    }

    /// Issues the all-reduce of these sums over the replicas.
    pub(crate) fn all_reduce(
        self,
        context: &Context,
        tag: Tag,
        scaling: Scaling,
    ) -> Result<AllReducing, Error> {
        Ok(match self {
            Self::Host(partial) => {
                AllReducing::Host(context.all_reduce.all_reduce_scaled(tag, partial, scaling)?)
            }
            Self::Device(sums) => AllReducing::Device(sums.all_reduce(context, tag, scaling)?),
        })
    }

    /// Adds other sums to these, or replaces these by them.
    pub(crate) fn fold_in(
        &mut self,
        context: &Context,
        (other, fold): (&Self, Fold),
        step: u64,
    ) -> Result<(), Error> {
        match (self, other) {
            (Self::Host(sums), Self::Host(other)) => {
                settle(sums, other, Divisor::ONE, fold);
                Ok(())
            }
            (Self::Device(sums), Self::Device(other)) => sums.fold_in(context, (other, fold), step),
            _ => unreachable!("all sums of a model lie in one place"),
        }
    }

    /// These sums, if they lie on a device.
    fn on_device(&self) -> Option<&DeviceSums> {
        match self {
            Self::Host(_) => None,
            Self::Device(sums) => Some(sums),
        }
    }

    /// Returns the sums on the host: borrowed, or a copy of those of a device.
    ///
    /// # Errors
    /// If they lie on a device that fails.
    pub(crate) fn to_host(&self, context: &Context, step: u64) -> Result<Cow<'_, [f32]>, Error> {
        match self {
            Self::Host(values) => Ok(Cow::Borrowed(values)),
            Self::Device(sums) => sums.to_host(context, step).map(Cow::Owned),
        }
    }

    /// The norm and the first non-finite element of each of these, by unit.
    ///
    /// # Errors
    /// If they lie on a device that fails.
    pub(crate) fn survey(
        context: &Context,
        (all, step): (&[Self], u64),
    ) -> Result<Vec<Seen>, Error> {
        let mut seen: Vec<_> = all.iter().map(Self::seen_on_host).collect();
        let there =
            all.iter().enumerate().filter_map(|(unit, sums)| Some((unit, sums.on_device()?)));
        let (units, there): (Vec<usize>, Vec<&DeviceSums>) = there.unzip();
        if !there.is_empty() {
            let found = DeviceSums::survey(context, &there, step)?;
            let index = |found: u64| usize::try_from(found).unwrap_or(usize::MAX);
            for (unit, found) in units.into_iter().zip(found) {
                let first_non_finite = found.first_non_finite.map(index);
                seen[unit] = Seen { squared_norm: found.squared_norm, first_non_finite };
            }
        }
        Ok(seen)
    }

    /// Returns the first element of these sums, by unit, that a device has noted as not finite.
    /// Waits for the notes.
    ///
    /// # Errors
    /// If they lie on a device that fails.
    pub(crate) fn sighting<'a>(
        context: &Context,
        sums: impl Iterator<Item = (UnitId, &'a Self)>,
        step: u64,
    ) -> Result<Option<Sighting>, Error> {
        let there = sums.filter_map(|(unit, sums)| Some((unit, sums.on_device()?)));
        DeviceSums::sighting(context, &there.collect::<Vec<_>>(), step)
    }

    fn seen_on_host(&self) -> Seen {
        match self {
            Self::Host(values) => {
                let squared_norm = squared_norm(values);
                let is_finite = squared_norm.is_finite();
                let first_non_finite = if is_finite { None } else { first_non_finite(values) };
                Seen { squared_norm, first_non_finite }
            }
            Self::Device(_) => Seen { squared_norm: 0.0, first_non_finite: None },
        }
    }
}

/// Returns a buffer of the step before, if it has that length, or else a new one.
///
/// # Errors
/// If there is no memory for it.
pub(crate) fn sized(
    buffer: Vec<f32>,
    len: usize,
    category: Category,
) -> Result<Vec<f32>, hsdp_kernels::Error> {
    if buffer.len() == len {
        return Ok(buffer);
    }
    let _scope = memory::scope(category);
    hsdp_kernels::zeros(len)
}

/// A reduce-scatter that is under way.
#[derive(Debug)]
pub(crate) enum Scattering {
    Host(Pending<Reduced>),
    Device(DeviceScattering),
}

impl Scattering {
    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Self::Host(pending) => pending.is_complete(),
            Self::Device(pending) => pending.is_complete(),
        }
    }

    pub(crate) fn wait(self) -> Result<Scattered, Error> {
        Ok(match self {
            Self::Host(pending) => {
                let Reduced { partial, non_finite } = pending.wait()?;
                Scattered { sums: Sums::Host(partial), non_finite }
            }
            Self::Device(pending) => {
                Scattered { sums: Sums::Device(pending.wait()?), non_finite: None }
            }
        })
    }
}

/// The result of a reduce-scatter.
#[derive(Debug)]
pub(crate) struct Scattered {
    pub(crate) sums: Sums,
    /// The first of the sums that is not finite. A device notes it itself, and the step reads it at its end.
    pub(crate) non_finite: Option<NonFiniteAt>,
}

/// An all-reduce that is under way.
#[derive(Debug)]
pub(crate) enum AllReducing {
    Host(Pending<Vec<f32>>),
    Device(DeviceAllReducing),
}

impl AllReducing {
    pub(crate) fn wait(self) -> Result<Sums, Error> {
        Ok(match self {
            Self::Host(pending) => Sums::Host(pending.wait()?),
            Self::Device(pending) => Sums::Device(pending.wait()?),
        })
    }
}
