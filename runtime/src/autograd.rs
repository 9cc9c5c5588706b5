//! Values that are spread over the mesh, and collectives with gradients, apart from the step.

pub mod collective;
pub mod dist;
