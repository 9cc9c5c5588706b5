//! Parameters or gradients in host memory, with one owner or several.

use std::sync::Arc;

use bytemuck::Zeroable;
use half::{bf16, f16};
use hsdp_sharding::{ByteCount, DType, ElemCount};

use crate::error::Error;
use crate::values::{Values, ValuesMut};

/// Owned parameters or gradients in host memory, of dtype f32, f16 or bf16, which is known at run
/// time.
#[derive(Debug, Clone, PartialEq)]
pub enum HostBuffer {
    /// Elements of dtype f32.
    F32(Vec<f32>),
    /// Elements of dtype f16.
    F16(Vec<f16>),
    /// Elements of dtype bf16.
    BF16(Vec<bf16>),
}

impl HostBuffer {
    /// Allocates `len` zeros of `dtype`. The allocator returns zeroed memory, so pages that are
    /// never written cost nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NotReal`] if `dtype` is not f32, f16 or bf16; [`Error::OutOfMemory`] if the
    /// allocation fails.
    pub fn zeros(dtype: DType, len: usize) -> Result<Self, Error> {
        match dtype {
            DType::F32 => zeros(len).map(Self::F32),
            DType::F16 => zeros(len).map(Self::F16),
            DType::BF16 => zeros(len).map(Self::BF16),
            dtype => Err(Error::NotReal { dtype }),
        }
    }

    /// Borrows the elements for reading.
    pub fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::F16(values) => Values::F16(values),
            Self::BF16(values) => Values::BF16(values),
        }
    }

    /// Borrows the elements for writing.
    pub fn values_mut(&mut self) -> ValuesMut<'_> {
        match self {
            Self::F32(values) => ValuesMut::F32(values),
            Self::F16(values) => ValuesMut::F16(values),
            Self::BF16(values) => ValuesMut::BF16(values),
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.values().len()
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.values().dtype()
    }

    /// The size of the elements in bytes. Spare capacity is not counted.
    pub fn bytes(&self) -> ByteCount {
        ElemCount(self.len() as u64).bytes(self.dtype())
    }
}

impl From<Vec<f32>> for HostBuffer {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl From<Vec<f16>> for HostBuffer {
    fn from(values: Vec<f16>) -> Self {
        Self::F16(values)
    }
}

impl From<Vec<bf16>> for HostBuffer {
    fn from(values: Vec<bf16>) -> Self {
        Self::BF16(values)
    }
}

/// Parameters or gradients in host memory with several owners, of dtype f32, f16 or bf16, which is
/// known at run time.
///
/// A clone is another handle to the same elements.
#[derive(Debug, Clone, PartialEq)]
pub enum SharedBuffer {
    /// Elements of dtype f32.
    F32(Arc<Vec<f32>>),
    /// Elements of dtype f16.
    F16(Arc<Vec<f16>>),
    /// Elements of dtype bf16.
    BF16(Arc<Vec<bf16>>),
}

impl SharedBuffer {
    /// Borrows the elements for reading.
    pub fn values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::F16(values) => Values::F16(values),
            Self::BF16(values) => Values::BF16(values),
        }
    }

    /// Borrows the elements for writing. If there are other handles, this one first gets a copy of
    /// its own, and the others keep the old elements.
    pub fn make_mut(&mut self) -> ValuesMut<'_> {
        match self {
            Self::F32(values) => ValuesMut::F32(Arc::make_mut(values).as_mut_slice()),
            Self::F16(values) => ValuesMut::F16(Arc::make_mut(values).as_mut_slice()),
            Self::BF16(values) => ValuesMut::BF16(Arc::make_mut(values).as_mut_slice()),
        }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.values().len()
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.values().dtype()
    }
}

impl From<HostBuffer> for SharedBuffer {
    fn from(buffer: HostBuffer) -> Self {
        match buffer {
            HostBuffer::F32(values) => Self::F32(Arc::new(values)),
            HostBuffer::F16(values) => Self::F16(Arc::new(values)),
            HostBuffer::BF16(values) => Self::BF16(Arc::new(values)),
        }
    }
}

impl From<Arc<Vec<f32>>> for SharedBuffer {
    fn from(values: Arc<Vec<f32>>) -> Self {
        Self::F32(values)
    }
}

/// Allocates `len` zeros. The allocator returns zeroed memory, so pages that are never written cost
/// nothing.
///
/// # Errors
///
/// [`Error::OutOfMemory`] if the allocation fails. The process is not aborted.
pub fn zeros<T: Zeroable>(len: usize) -> Result<Vec<T>, Error> {
    let bytes = len.saturating_mul(size_of::<T>());
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| Error::OutOfMemory { bytes })
}
