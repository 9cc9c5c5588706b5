//! A Varying value is a term of a sum only if its owner says so.

use hsdp::dist::{Carrier, Dist, OnShard, Sum, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Varying>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnShard, Sum)?;
    Ok(())
}

fn main() {}
