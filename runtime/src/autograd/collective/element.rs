//! The types of elements that have a gradient.

use half::{bf16, f16};
use hsdp_kernels::Element;

/// A type of elements that have a gradient: `f64`, `f32`, `f16` or `bf16`.
///
/// Arithmetic between the collectives is done in f64, and rounded once. Integers have no gradient:
///
/// ```compile_fail,E0277
/// # use hsdp::collective::{Collective, Copies, Reducer};
/// # use hsdp_comm::{Channel, Tag, World};
/// let group = World::single().world_group(Channel::User);
/// let sum = Collective::AllReduce { reducer: Reducer::Sum, output: Copies::Replicate };
/// sum.forward(&group, Tag::default(), vec![1_i64]).map(drop)?; // no: i64 has no gradient
/// # Ok::<(), hsdp::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "elements of type `{Self}` have no gradient",
    note = "differentiable collectives take f64, f32, f16 or bf16; `hsdp::Group` has the same collectives for integers"
)]
pub trait Differentiable: Element + sealed::Sealed {
    /// The same value in f64, exactly.
    fn to_f64(self) -> f64;

    /// `value`, rounded to the nearest.
    fn from_f64(value: f64) -> Self;
}

mod sealed {
    #[expect(unnameable_types, reason = "it seals `Differentiable`")]
    pub trait Sealed {}
}

macro_rules! differentiable {
    ($($element:ty: $to:expr, $from:expr;)+) => {$(
        impl sealed::Sealed for $element {}

        impl Differentiable for $element {
            fn to_f64(self) -> f64 {
                $to(self)
            }

            fn from_f64(value: f64) -> Self {
                $from(value)
            }
        }
    )+};
}

differentiable! {
    f64: f64::from, f64::from;
    f32: f64::from, to_nearest_f32;
    f16: f16::to_f64, f16::from_f64;
    bf16: bf16::to_f64, bf16::from_f64;
}

#[expect(clippy::cast_possible_truncation, reason = "it rounds to the nearest")]
fn to_nearest_f32(value: f64) -> f32 {
    value as f32
}
