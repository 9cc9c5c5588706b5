//! Each rank goes on with a Replicate value in its own way already.

use hsdp::dist::{Carrier, Dist, OnShard, Replicate, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Varying, Replicate>) -> Result<(), T::Error> {
    let _ = x.share(OnShard)?;
    Ok(())
}

fn main() {}
