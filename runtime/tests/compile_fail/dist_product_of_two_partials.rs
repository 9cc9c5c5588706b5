//! The product of two sums is not the sum of products.

use hsdp::dist::{Carrier, Dist, Partial, Varying};

fn wrong<T: Carrier>(
    x: &Dist<T, Varying, Partial>,
    y: &Dist<T, Varying, Partial>,
) -> Result<(), T::Error> {
    let _ = x.zip_product(y, |x, _| Ok(x.clone()))?;
    Ok(())
}

fn main() {}
