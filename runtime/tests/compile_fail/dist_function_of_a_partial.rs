//! A function of a sum is not the sum of the function.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.map(|x| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
