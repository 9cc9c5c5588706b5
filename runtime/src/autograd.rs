//! Values that are spread over the mesh, and collectives with gradients, apart from the step.
//!
//! In reading order: `operation` (the collectives), `share` (a member's share in a reduction),
//! `backward` (forward and backward of each), `dist`.

mod backward;
pub mod dist;
mod operation;
mod share;

pub mod collective {
    //! Collectives with their gradients, on buffers of one rank's elements.
    //!
    //! The gradient is that of **the sum of all ranks' losses**: the gradient that every rank gets
    //! when each rank starts a backward from a loss of its own. Where all ranks hold the same loss,
    //! and it counts once, the output is [`Copies::Invariant`]. PyTorch issue 58005 asks which of
    //! the two is meant. `docs/gradients.md` answers the question, and the types of
    //! [`dist`](crate::autograd::dist) make a program decide it.
    //!
    //! In the table `g` is the cotangent of the output, `W` the number of members, and sums are
    //! over the members `k`:
    //!
    //! | collective | backward, of copies that are `Replicate` | of copies that are `Invariant` |
    //! |---|---|---|
    //! | all_reduce sum | sum of `g_k` | `g` |
    //! | all_reduce avg | sum of `g_k`, over `W` | `g / W` |
    //! | all_reduce premultiplied by `c` | `c` times the sum of `g_k` | `c g` |
    //! | all_reduce product | sum of `g_k`, times the product of the others' elements | `g` times that product |
    //! | all_reduce min, max | sum of `g_k`, shared evenly by the members that hold the extreme | `g`, shared likewise |
    //! | all_gather | reduce_scatter sum | the own part of `g` |
    //! | broadcast | reduce sum to the root | `g`, at the root |
    //! | reduce_scatter | all_gather, then as all_reduce | |
    //! | reduce | broadcast, then as all_reduce | |
    //! | gather, scatter | scatter, gather | |
    //! | all_to_all, permute, send | the same in the opposite direction | |
    //! | scan | scan from the other end | |
    //!
    //! The formulas come from the discussion in PyTorch issue 58005 and from the adjoints of linear
    //! maps. The backward of a product multiplies the other members' elements and never divides, so
    //! zeros need no special case.

    pub use super::backward::Backward;
    pub use super::operation::{Collective, Copies, Differentiable, MAX_PRODUCT, Reducer};
}
