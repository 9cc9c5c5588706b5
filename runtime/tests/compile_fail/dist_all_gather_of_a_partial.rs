//! The terms of a sum are not its parts.

use hsdp::dist::{Carrier, Dist, OnShard, Partial, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Varying, Partial>) -> Result<(), T::Error> {
    let _ = x.all_gather(OnShard)?;
    Ok(())
}

fn main() {}
