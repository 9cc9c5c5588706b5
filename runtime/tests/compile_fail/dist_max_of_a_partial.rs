//! The largest of the terms is not the largest of anything.

use hsdp::dist::{Carrier, Dist, Max, OnShard, Partial, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnShard, Max)?;
    Ok(())
}

fn main() {}
