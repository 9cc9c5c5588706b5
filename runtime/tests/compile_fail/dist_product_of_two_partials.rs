//! The product of two sums is not the sum of products.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<C: Carrier>(
    x: &Dist<C, Varying, Partial>,
    y: &Dist<C, Varying, Partial>,
) -> Result<(), C::Error> {
    let _ = x.zip_product(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
