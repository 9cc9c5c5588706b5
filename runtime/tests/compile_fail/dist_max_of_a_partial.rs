//! The largest of the terms is not the largest of anything.

use hsdp::dist::{Carrier, Dist, Max, OnShard, Partial, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Varying, Partial>) -> Result<(), T::Error> {
    let _ = x.all_reduce(OnShard, Max)?;
    Ok(())
}

fn main() {}
