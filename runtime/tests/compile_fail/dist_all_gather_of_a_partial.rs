//! The terms of a sum are not its parts.

use hsdp::dist::{Carrier, Dist, OnShard, Partial, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_gather(OnShard)?;
    Ok(())
}

fn main() {}
