//! The state of a value along an axis, as a type.

use super::axis::MeshAxis;
use super::carrier::Carrier;
use super::state::State;

/// A value that has one state along `A`, and may get another.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no single state along `{A}`",
    note = "`OnBoth` is for values that have the same state on both axes: go along `OnShard` and \
            `OnReplicate`, one after the other"
)]
pub trait Along<A: MeshAxis> {
    /// The autograd whose tensor the value carries.
    type Carrier: Carrier;

    /// The value's state along `A`.
    type State: State;

    /// The value's state along the other axis; the same state if `A` is the whole mesh.
    type Beside: State;

    /// The value in state `Q` along `A`.
    type With<Q: State>: made::Made<Self::Carrier>;
}

/// Construction from parts that were checked, for this crate alone.
pub(super) mod made {
    use crate::autograd::dist::carrier::Carrier;
    use crate::autograd::dist::tagged::Tagged;

    #[expect(unnameable_types, reason = "it keeps unchecked values inside")]
    pub trait Made<C: Carrier> {
        fn made(tagged: Tagged<C>) -> Self;
    }
}
