//! All ranks hold it already.

use hsdp::dist::{Carrier, Dist, OnShard, Replicate, Varying};

fn wrong<T: Carrier>(x: &Dist<T, Varying, Replicate>) -> Result<(), T::Error> {
    let _ = x.all_gather(OnShard)?;
    Ok(())
}

fn main() {}
