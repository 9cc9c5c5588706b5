//! Each rank uses a Replicate value in its own way already.

use hsdp::dist::{Carrier, Dist, OnShard, Replicate, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.share(OnShard)?;
    Ok(())
}

fn main() {}
