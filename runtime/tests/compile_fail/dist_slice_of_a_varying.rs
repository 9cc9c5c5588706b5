//! A rank's own value is no part of anything.

use hsdp::dist::{Carrier, Dist, OnShard, Partial, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Partial, Varying>) -> Result<(), T::Error> {
    let _ = x.slice(OnShard)?;
    Ok(())
}

fn main() {}
