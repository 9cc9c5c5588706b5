//! Values that are spread over the mesh, and collectives with gradients, apart from the step.

pub mod collective;
pub mod dist;
mod operation;
mod share;
mod state;
mod tape;
#[cfg(test)]
mod tests;
