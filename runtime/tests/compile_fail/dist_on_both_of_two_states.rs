//! The whole mesh is one axis only for a value in one state.

use hsdp::dist::{Carrier, Dist, OnBoth, Partial, Sum, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnBoth, Sum)?;
    Ok(())
}

fn main() {}
