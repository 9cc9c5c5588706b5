//! The sum of the copies would be too large by the number of ranks.

use hsdp::dist::{Carrier, Dist, OnShard, Replicate, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Varying, Replicate>) -> Result<(), T::Error> {
    let _ = x.to_partial(OnShard)?;
    Ok(())
}

fn main() {}
