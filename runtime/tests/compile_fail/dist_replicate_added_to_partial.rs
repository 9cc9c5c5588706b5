//! A Replicate value would be added once for each rank.

use hsdp::dist::{Carrier, Dist, Partial, Replicate, Varying};

fn wrong<T: Carrier>(
    x: &Dist<T, Varying, Partial>,
    y: &Dist<T, Varying, Replicate>,
) -> Result<(), T::Error> {
    let _ = x.zip_sum(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
