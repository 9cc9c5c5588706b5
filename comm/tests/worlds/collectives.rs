//! Every collective, on every dtype, with values in closed form of rank and size.

use crate::common::results;
use half::{bf16, f16};
use hsdp_comm::{Channel, Error, Group, Pending};
use hsdp_kernels::Element;

/// Runs `$check::<T>` for every element type.
macro_rules! all_dtypes {
    ($check:ident) => {
        everywhere(&$check::<f32>);
        everywhere(&$check::<f64>);
        everywhere(&$check::<half::f16>);
        everywhere(&$check::<half::bf16>);
        everywhere(&$check::<i32>);
        everywhere(&$check::<i64>);
        everywhere(&$check::<u32>);
        everywhere(&$check::<u64>);
    };
}

mod groups;
mod lending;
mod moving;
mod passing;
mod reducing;
mod refusals;

/// World sizes, and lengths that no number of members divides evenly.
const SIZES: [usize; 5] = [1, 2, 3, 4, 8];
const LENGTHS: [usize; 5] = [0, 1, 7, 1003, 20_011];

/// A small whole number as an element: exact in every dtype up to 256.
trait Number: Element {
    fn number(value: usize) -> Self;
}

macro_rules! numbers {
    ($($dtype:ty: $value:ident => $element:expr;)*) => {$(
        impl Number for $dtype {
            fn number($value: usize) -> Self {
                $element
            }
        }
    )*};
}

numbers! {
    f32: value => f32::from(u16::try_from(value).expect("small"));
    f64: value => f64::from(u16::try_from(value).expect("small"));
    f16: value => f16::from_f32(f32::number(value));
    bf16: value => bf16::from_f32(f32::number(value));
    i32: value => i32::try_from(value).expect("small");
    i64: value => i64::try_from(value).expect("small");
    u32: value => u32::try_from(value).expect("small");
    u64: value => u64::try_from(value).expect("small");
}

/// The input of rank `rank`: small numbers in which rank and place both show.
fn data_header(rank: usize, place: usize) -> usize {
    (3 * rank + place) % 13
}

fn values<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|place| T::number(data_header(rank, place))).collect()
}

fn settled<T>(pending: Result<Pending<T>, Error>) -> T {
    pending.and_then(Pending::wait).expect("the collective")
}

/// Runs `check` on every rank of worlds of every size, with every length. It is not generic: it would be compiled for each check.
fn everywhere(check: &(dyn Fn(&Group, usize, usize, usize) + Sync)) {
    for size in SIZES {
        results(size, |world| {
            let group = world.world_group(Channel::User);
            for len in LENGTHS {
                check(&group, world.rank().index(), size, len);
            }
        });
    }
}
