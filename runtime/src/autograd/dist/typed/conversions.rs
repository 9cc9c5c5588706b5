//! From one state to another, without a collective in the forward.

use super::Dist;
use crate::autograd::dist::along::Along;
use crate::autograd::dist::axis::MeshAxis;
use crate::autograd::dist::carrier::Carrier;
use crate::autograd::dist::rules::{Copied, CountedOnce, Own, Sliced};
use crate::autograd::dist::state::{AxisState, Partial, Replicate, State, Varying};
use crate::autograd::operation::Collective;

/// # Conversions
///
/// All go along one axis. A conversion whose backward is a collective is recorded as one. Those methods are
/// **collective** in that sense, in the same order on all ranks.
impl<C: Carrier, R: State, S: State> Dist<C, R, S> {
    /// Converts a Replicate value to a Varying one. The same elements; the backward moves nothing.
    ///
    /// # Errors
    /// Only those of the autograd.
    pub fn to_varying<A: MeshAxis>(
        &self,
        _: A,
    ) -> Result<<Self as Along<A>>::With<Varying>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Copied,
    {
        self.reinterpreted::<A, Varying>()
    }

    /// Converts a Varying value to a Partial one, the terms of a sum. The same elements; the backward moves nothing.
    ///
    /// # Errors
    /// Only those of the autograd.
    pub fn to_partial<A: MeshAxis>(
        &self,
        _: A,
    ) -> Result<<Self as Along<A>>::With<Partial>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.reinterpreted::<A, Partial>()
    }

    /// Converts an Invariant value to a Replicate one, which each rank uses in its own way. The same elements; the
    /// backward is an all_reduce.
    ///
    /// # Errors
    /// Errors of [`Carrier::apply`].
    pub fn share<A: MeshAxis>(
        &self,
        axis: A,
    ) -> Result<<Self as Along<A>>::With<Replicate>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: CountedOnce,
    {
        self.applied(axis, &Collective::Share)
    }

    /// Each rank keeps its own rows of a value that all ranks hold. `[size * n, ..]` to `[n, ..]`.
    ///
    /// The backward of an Invariant value is an all_gather; that of a Replicate one moves nothing.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if the ranks cannot share the rows evenly; those of
    /// [`Carrier::apply`].
    pub fn slice<A: MeshAxis>(&self, axis: A) -> Result<<Self as Along<A>>::With<Varying>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Sliced,
    {
        let input = <<Self as Along<A>>::State as Sliced>::COPIES;
        self.applied(axis, &Collective::Slice { input })
    }

    /// Each rank's rows become its part of a whole whose other rows are zeros: a term of the sum that all_gather would
    /// make. `[n, ..]` to `[size * n, ..]`.
    ///
    /// # Errors
    /// Errors of [`Carrier::apply`].
    pub fn place<A: MeshAxis>(&self, axis: A) -> Result<<Self as Along<A>>::With<Partial>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Place)
    }

    /// The first rank keeps its copy, the others get zeros: terms of a sum in which the value counts once.
    ///
    /// # Errors
    /// Errors of [`Carrier::apply`].
    pub fn only_first<A: MeshAxis>(
        &self,
        axis: A,
    ) -> Result<<Self as Along<A>>::With<Partial>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Copied,
    {
        self.applied(axis, &Collective::OnlyFirst)
    }

    fn reinterpreted<A, Q>(&self) -> Result<<Self as Along<A>>::With<Q>, C::Error>
    where
        A: MeshAxis,
        Q: State,
        Self: Along<A, Carrier = C>,
    {
        let to: AxisState = Q::STATE;
        self.tagged.reinterpret(A::AXES, to).map(Self::made)
    }
}
