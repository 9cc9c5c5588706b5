//! All ranks hold a Replicate value already.

use hsdp::dist::{Carrier, Dist, OnShard, Replicate, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.all_gather(OnShard)?;
    Ok(())
}

fn main() {}
