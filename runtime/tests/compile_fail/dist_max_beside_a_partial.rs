//! The largest of the replicas' terms is not a term of the largest.

use hsdp::dist::{Carrier, Dist, Max, OnReplicate, Partial, Varying};

fn wrong<C: Carrier>(x: &Dist<C, Varying, Partial>) -> Result<(), C::Error> {
    let _ = x.all_reduce(OnReplicate, Max)?;
    Ok(())
}

fn main() {}
