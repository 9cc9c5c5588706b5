//! The arithmetic of reductions, for each element type. The module is private, which seals
//! [`Element`](crate::Element).
//!
//! Generic code over elements can name the methods of the sealing trait. They take an argument that
//! only this crate can make, so other crates cannot call them.

use bytemuck::Pod;
use half::{bf16, f16};

use crate::float16::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};

/// Proof that the caller is this crate.
#[derive(Debug, Clone, Copy)]
#[expect(unnameable_types, reason = "it keeps the methods of `Arithmetic` private")]
pub struct CrateToken(());

impl CrateToken {
    pub(crate) const HERE: Self = Self(());
}

/// The largest number of sources that a reduction reads side by side.
pub(crate) const MOST_ABREAST: usize = 4;

/// The reduction of elements of a type, through accumulators of a type that may be wider.
#[expect(unnameable_types, reason = "it seals `Element`")]
pub trait Arithmetic: Pod {
    /// The type in which a reduction computes: f32 for the 16-bit floats, the type itself for all
    /// others.
    type Accumulator: Number;

    /// The number of sources that a reduction reads side by side, at most [`MOST_ABREAST`]. The
    /// machine then prefetches all of them, and a sum is written less often. Sources that must be
    /// converted are read in pairs: four of bf16 side by side took twice as long, from memory, as
    /// one after the other.
    const ABREAST: usize;

    /// Returns `elements` as accumulators, exactly: the elements themselves, or a copy in
    /// `scratch`, which is as long.
    fn widen<'a>(
        elements: &'a [Self],
        scratch: &'a mut [Self::Accumulator],
        inside: CrateToken,
    ) -> &'a [Self::Accumulator];

    /// Calls `fill`, which writes all accumulators, and copies them into `elements`, rounding once.
    /// The accumulators are the elements themselves, or `scratch`, which is as long.
    fn narrow(
        elements: &mut [Self],
        scratch: &mut [Self::Accumulator],
        fill: impl FnOnce(&mut [Self::Accumulator]),
        inside: CrateToken,
    );
}

/// A type in which reductions compute.
#[expect(unnameable_types, reason = "it seals `Element`")]
pub trait Number: Pod {
    /// Divides by a number of members; `None` for types without an average.
    const DIVIDE: Option<fn(Self, usize) -> Self>;

    /// The sum; integers wrap around.
    fn sum(self, other: Self) -> Self;

    /// The product; integers wrap around.
    fn product(self, other: Self) -> Self;

    /// The lesser, NaN if either is NaN, `self` where they are equal.
    fn lesser(self, other: Self) -> Self;

    /// The greater, NaN if either is NaN, `self` where they are equal.
    fn greater(self, other: Self) -> Self;
}

impl Arithmetic for f16 {
    type Accumulator = f32;
    const ABREAST: usize = 2;

    fn widen<'a>(elements: &'a [Self], scratch: &'a mut [f32], _: CrateToken) -> &'a [f32] {
        widen_f16(scratch, elements);
        scratch
    }

    fn narrow(
        elements: &mut [Self],
        scratch: &mut [f32],
        fill: impl FnOnce(&mut [f32]),
        _: CrateToken,
    ) {
        fill(scratch);
        narrow_f16(elements, scratch);
    }
}

impl Arithmetic for bf16 {
    type Accumulator = f32;
    const ABREAST: usize = 2;

    fn widen<'a>(elements: &'a [Self], scratch: &'a mut [f32], _: CrateToken) -> &'a [f32] {
        widen_bf16(scratch, elements);
        scratch
    }

    fn narrow(
        elements: &mut [Self],
        scratch: &mut [f32],
        fill: impl FnOnce(&mut [f32]),
        _: CrateToken,
    ) {
        fill(scratch);
        narrow_bf16(elements, scratch);
    }
}

/// Implements [`Arithmetic`] for types that are their own accumulators.
macro_rules! own_accumulator {
    ($($number:ty),+) => {$(
        impl Arithmetic for $number {
            type Accumulator = Self;
            const ABREAST: usize = MOST_ABREAST;

            fn widen<'a>(elements: &'a [Self], _: &'a mut [Self], _: CrateToken) -> &'a [Self] {
                elements
            }

            fn narrow(
                elements: &mut [Self],
                _: &mut [Self],
                fill: impl FnOnce(&mut [Self]),
                _: CrateToken,
            ) {
                fill(elements);
            }
        }
    )+};
}

own_accumulator!(f32, f64, i32, i64, u32, u64);

macro_rules! float {
    ($($number:ty),+) => {$(
        impl Number for $number {
            // A count of members is far below 2^24, from where on f32 would round it.
            const DIVIDE: Option<fn(Self, usize) -> Self> = Some(|sum, count| sum / count as $number);

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                if (other < self) | other.is_nan() { other } else { self }
            }

            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                if (other > self) | other.is_nan() { other } else { self }
            }
        }
    )+};
}

float!(f32, f64);

macro_rules! integer {
    ($($number:ty),+) => {$(
        impl Number for $number {
            const DIVIDE: Option<fn(Self, usize) -> Self> = None;

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )+};
}

integer!(i32, i64, u32, u64);
