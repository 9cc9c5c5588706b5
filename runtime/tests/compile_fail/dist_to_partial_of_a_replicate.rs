//! The sum of the copies would be too large by the number of ranks.

use hsdp::dist::{Carrier, Dist, OnShard, Replicate, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Replicate>) -> Result<(), C::Error> {
    let _ = x.to_partial(OnShard)?;
    Ok(())
}

fn main() {}
