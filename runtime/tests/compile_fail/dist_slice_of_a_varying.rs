//! A rank's own value is no part of anything.

use hsdp::dist::{Carrier, Dist, OnShard, Partial, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Partial, Varying>) -> Result<(), C::Error> {
    let _ = x.slice(OnShard)?;
    Ok(())
}

fn main() {}
