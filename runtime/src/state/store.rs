//! Values that lie on the host, or on a device.

use std::borrow::{Borrow, Cow};
use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, DeviceBuffer};
use hsdp_kernels::memory::{self, Category};
use hsdp_kernels::{Values, copy_past_caches};
use hsdp_sharding::{DType, UnitId};

use crate::error::Error;
use crate::state::context::ErrorSite;
use crate::state::model_device::ModelDevice;

/// A value of the host, or a value of a device.
#[derive(Clone, Debug)]
pub(crate) enum Located<H, D> {
    Host(H),
    Device(There<D>),
}

/// A value of a device, and the device.
#[derive(Clone, Debug)]
pub(crate) struct There<D> {
    pub(crate) value: D,
    pub(crate) device: Arc<ModelDevice>,
}

/// Elements in f32 that have one owner.
pub(crate) type LocatedF32 = Located<Vec<f32>, DeviceBuffer>;

impl<H: Borrow<Vec<f32>>, D: Borrow<DeviceBuffer>> Located<H, D> {
    /// Returns elements on the host: borrowed, or a copy, for which the call waits.
    ///
    /// # Errors
    /// If there is no memory for the copy; errors of the device.
    pub(crate) fn to_host(
        &self,
        site: ErrorSite<'_>,
        range: Range<usize>,
    ) -> Result<Cow<'_, [f32]>, Error> {
        match self {
            Self::Host(values) => Ok(Cow::Borrowed(&values.borrow()[range])),
            Self::Device(_) => {
                let mut copy = hsdp_kernels::zeros(range.len())?;
                self.copy_to(site, range.start, &mut copy)?;
                Ok(Cow::Owned(copy))
            }
        }
    }

    /// Copies elements, from the `from`-th on, to the host. Waits for the copy.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn copy_to(
        &self,
        site: ErrorSite<'_>,
        from: usize,
        into: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            Self::Host(values) => {
                copy_past_caches(into, &values.borrow()[from..from + into.len()]);
                Ok(())
            }
            Self::Device(There { value, device }) => {
                let read =
                    value.borrow().read_back_into(&device.stream, from, into, device.patience);
                read.map_err(|error| site.device(error))
            }
        }
    }

    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.borrow().len(),
            Self::Device(there) => there.value.borrow().len(),
        }
    }

    /// Returns the elements on the host.
    ///
    /// # Panics
    /// If they lie on a device.
    pub(crate) fn here(&self) -> &[f32] {
        match self {
            Self::Host(values) => values.borrow(),
            Self::Device(_) => elsewhere(),
        }
    }

    /// Returns the buffer on a device.
    ///
    /// # Panics
    /// If the elements lie on the host.
    pub(crate) fn there(&self) -> &DeviceBuffer {
        match self {
            Self::Device(there) => there.value.borrow(),
            Self::Host(_) => elsewhere(),
        }
    }
}

impl LocatedF32 {
    /// Makes a store of zeros for each unit's length, where the model is updated. They count as
    /// optimizer state.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Device`](Error) if a device has no memory.
    pub(crate) fn zeros(
        site: ErrorSite<'_>,
        lens: impl Iterator<Item = usize>,
    ) -> Result<Vec<Self>, Error> {
        let device = site.context.update_device();
        let zeros = |(unit, len)| match device {
            None => site.zeros(Category::Optimizer, UnitId::new(unit), len).map(Self::Host),
            Some(device) => {
                let value = zeros_on(device, len).map_err(|error| site.device(error))?;
                Ok(Self::Device(There { value, device: Arc::clone(device) }))
            }
        };
        lens.enumerate().map(zeros).collect()
    }

    /// Returns the elements on the host, to change them.
    ///
    /// # Panics
    /// If they lie on a device.
    pub(crate) fn here_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Host(values) => values,
            Self::Device(_) => elsewhere(),
        }
    }

    /// Returns the buffer on a device, to change it.
    ///
    /// # Panics
    /// If the elements lie on the host.
    pub(crate) fn there_mut(&mut self) -> &mut DeviceBuffer {
        match self {
            Self::Device(there) => &mut there.value,
            Self::Host(_) => elsewhere(),
        }
    }

    /// Fills the store with values that `fill` writes. Waits for nothing.
    pub(crate) fn fill<E: From<Error>>(
        &mut self,
        site: ErrorSite<'_>,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let There { value, device } = match self {
            Self::Host(values) => return fill(values),
            Self::Device(there) => there,
        };
        let mut values = hsdp_kernels::zeros(value.len()).map_err(Error::from)?;
        fill(&mut values)?;
        let written = value.write(&device.stream, Values::F32(&values));
        Ok(written.map_err(|error| site.device(error))?)
    }
}

/// Makes zeros on the host that count in this category. The text of an error is made outside of the
/// scope, in which memory may be short.
///
/// # Errors
/// If there is no memory for them.
pub(crate) fn zeros_in(category: Category, len: usize) -> Result<Vec<f32>, hsdp_kernels::Error> {
    let _scope = memory::scope(category);
    hsdp_kernels::zeros(len)
}

impl ErrorSite<'_> {
    /// Makes zeros of a unit on the host that count in this category.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn zeros(
        &self,
        category: Category,
        unit: UnitId,
        len: usize,
    ) -> Result<Vec<f32>, Error> {
        zeros_in(category, len).map_err(|error| self.memory(unit, error))
    }
}

fn zeros_on(device: &ModelDevice, len: usize) -> Result<DeviceBuffer, CudaError> {
    let mut zeros = device.buffer(Category::Optimizer, DType::F32, len)?;
    zeros.fill(&device.stream, 0)?;
    Ok(zeros)
}

/// Ends the program: all parts of a model lie where the model says.
fn elsewhere() -> ! {
    unreachable!("a part of a model lies elsewhere than the model")
}
