//! Borrowed parameters or gradients, whose dtype is known at run time.

use std::ops::Range;

use half::{bf16, f16};
use hsdp_sharding::DType;

/// Parameters or gradients of f32, f16 or bf16, borrowed for reading.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values<'a> {
    /// Elements of dtype f32.
    F32(&'a [f32]),
    /// Elements of dtype f16.
    F16(&'a [f16]),
    /// Elements of dtype bf16.
    BF16(&'a [bf16]),
}

/// Parameters or gradients of f32, f16 or bf16, borrowed for writing.
#[derive(Debug, PartialEq)]
pub enum ValuesMut<'a> {
    /// Elements of dtype f32.
    F32(&'a mut [f32]),
    /// Elements of dtype f16.
    F16(&'a mut [f16]),
    /// Elements of dtype bf16.
    BF16(&'a mut [bf16]),
}

impl<'a> Values<'a> {
    /// The number of elements.
    pub const fn len(self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::BF16(values) => values.len(),
        }
    }

    /// Whether there are no elements.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The dtype of the elements.
    pub const fn dtype(self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
        }
    }

    /// The elements of `range`.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond the end, or ends before it starts.
    pub fn slice(self, range: Range<usize>) -> Values<'a> {
        match self {
            Self::F32(values) => Values::F32(&values[range]),
            Self::F16(values) => Values::F16(&values[range]),
            Self::BF16(values) => Values::BF16(&values[range]),
        }
    }
}

impl<'a> ValuesMut<'a> {
    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.as_values().len()
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dtype of the elements.
    pub const fn dtype(&self) -> DType {
        self.as_values().dtype()
    }

    /// The elements of `range`, with the lifetime of the whole borrow.
    ///
    /// # Panics
    ///
    /// If `range` reaches beyond the end, or ends before it starts.
    pub fn slice(self, range: Range<usize>) -> ValuesMut<'a> {
        match self {
            Self::F32(values) => ValuesMut::F32(&mut values[range]),
            Self::F16(values) => ValuesMut::F16(&mut values[range]),
            Self::BF16(values) => ValuesMut::BF16(&mut values[range]),
        }
    }

    /// Copies the elements of `source` into these.
    ///
    /// # Panics
    ///
    /// If the two differ in dtype or length.
    pub fn copy_from(self, source: Values<'_>) {
        match (self, source) {
            (Self::F32(target), Values::F32(source)) => target.copy_from_slice(source),
            (Self::F16(target), Values::F16(source)) => target.copy_from_slice(source),
            (Self::BF16(target), Values::BF16(source)) => target.copy_from_slice(source),
            (target, source) => {
                panic!("cannot copy {} elements into {}", source.dtype(), target.dtype())
            }
        }
    }

    /// Borrows the same elements for a shorter time, so that they can be passed on more than once.
    pub const fn reborrow(&mut self) -> ValuesMut<'_> {
        match self {
            Self::F32(values) => ValuesMut::F32(values),
            Self::F16(values) => ValuesMut::F16(values),
            Self::BF16(values) => ValuesMut::BF16(values),
        }
    }

    /// Borrows the elements for reading.
    pub const fn as_values(&self) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(values),
            Self::F16(values) => Values::F16(values),
            Self::BF16(values) => Values::BF16(values),
        }
    }
}
