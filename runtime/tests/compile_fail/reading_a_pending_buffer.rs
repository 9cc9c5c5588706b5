//! A buffer of a collective that is under way cannot be read.

use hsdp_comm::{Channel, Error, Reduction, Tag, World};

fn sum(world: &World) -> Result<f32, Error> {
    let pending = world.world_group(Channel::User).all_reduce(Tag::default(), Reduction::Sum, vec![1.0_f32])?;
    Ok(pending[0])
}

fn main() {}
