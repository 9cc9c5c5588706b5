//! A Replicate value would be added once for each rank.

use hsdp::dist::{Carrier, Dist, Partial, Replicate, Varying};

fn wrong<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
    y: &Dist<C, Varying, Replicate>,
) -> Result<(), C::Error> {
    let _ = x.zip_sum(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
