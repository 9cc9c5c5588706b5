//! The axes along which a collective goes, as types.

use std::fmt::{self, Debug};

use super::carrier::Carrier;
use super::state::State;
use super::tagged::Tagged;
use super::typed::Dist;

/// An axis that a method goes along: [`OnReplicate`], [`OnShard`], or [`OnBoth`] for the whole mesh.
pub trait MeshAxis: Copy + Debug {
    /// The axis as a value.
    const AXES: Axes;
}

/// The axes of a [`MeshAxis`], as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axes {
    /// The replicate axis.
    Replicate,
    /// The shard axis.
    Shard,
    /// The whole mesh, in rank order.
    Both,
}

impl Axes {
    /// The indices of these axes in a pair of states.
    pub(super) const fn places(self) -> &'static [usize] {
        match self {
            Self::Replicate => &[0],
            Self::Shard => &[1],
            Self::Both => &[0, 1],
        }
    }
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Replicate => "the replicate axis",
            Self::Shard => "the shard axis",
            Self::Both => "the whole mesh",
        })
    }
}

/// Along the replicate axis.
#[derive(Clone, Copy, Debug)]
pub struct OnReplicate;

/// Along the shard axis.
#[derive(Clone, Copy, Debug)]
pub struct OnShard;

/// Over the whole mesh, in rank order. For values in the same state on both axes.
#[derive(Clone, Copy, Debug)]
pub struct OnBoth;

impl MeshAxis for OnReplicate {
    const AXES: Axes = Axes::Replicate;
}

impl MeshAxis for OnShard {
    const AXES: Axes = Axes::Shard;
}

impl MeshAxis for OnBoth {
    const AXES: Axes = Axes::Both;
}

/// A value that has one state along `A`, and may get another.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no single state along `{A}`",
    note = "`OnBoth` is for values that have the same state on both axes: go along `OnShard` and `OnReplicate`, one after the \
            other"
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

impl<C: Carrier, R: State, S: State> made::Made<C> for Dist<C, R, S> {
    fn made(tagged: Tagged<C>) -> Self {
        Self::new(tagged)
    }
}

impl<C: Carrier, R: State, S: State> Along<OnReplicate> for Dist<C, R, S> {
    type Carrier = C;
    type State = R;
    type Beside = S;
    type With<Q: State> = Dist<C, Q, S>;
}

impl<C: Carrier, R: State, S: State> Along<OnShard> for Dist<C, R, S> {
    type Carrier = C;
    type State = S;
    type Beside = R;
    type With<Q: State> = Dist<C, R, Q>;
}

impl<C: Carrier, Q: State> Along<OnBoth> for Dist<C, Q, Q> {
    type Carrier = C;
    type State = Q;
    type Beside = Q;
    type With<P: State> = Dist<C, P, P>;
}
