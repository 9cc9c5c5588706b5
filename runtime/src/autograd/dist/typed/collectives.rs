//! The collectives, from state to state.

use super::Dist;
use crate::autograd::dist::along::Along;
use crate::autograd::dist::along::made::Made;
use crate::autograd::dist::axis::MeshAxis;
use crate::autograd::dist::carrier::Carrier;
use crate::autograd::dist::rules::{Own, Reduces};
use crate::autograd::dist::state::{Invariant, Replicate, State, Varying};
use crate::autograd::dist::tagged::Tagged;
use crate::autograd::operation::{Collective, Copies};

/// The result of a method of `D` along `A`, in state `Q` there.
type With<D, A, Q> = <D as Along<A>>::With<Q>;

/// # Collectives
///
/// All are **collective** over the ranks along the axis, in the same order on all of them, and so are their backwards.
/// Parts are rows, equal and in rank order; a root is an index along the axis.
///
/// All have the errors of [`Carrier::apply`], and [`Error::Collective`](crate::Error::Collective) if the value does not
/// fit.
impl<C: Carrier, R: State, S: State> Dist<C, R, S> {
    /// Every rank gets the reduction of all ranks' elements, and uses it in its own way.
    ///
    /// # Errors
    /// As said above.
    pub fn all_reduce<A, Q>(
        &self,
        axis: A,
        reduction: Q,
    ) -> Result<With<Self, A, Replicate>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        let (reducer, output) = (reduction.reducer(), Copies::Replicate);
        self.applied(axis, &Collective::AllReduce { reducer, output })
    }

    /// Every rank gets the reduction of all ranks' elements, which counts once.
    ///
    /// # Errors
    /// As said above.
    pub fn all_reduce_invariant<A, Q>(
        &self,
        axis: A,
        reduction: Q,
    ) -> Result<With<Self, A, Invariant>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        let (reducer, output) = (reduction.reducer(), Copies::Invariant);
        self.applied(axis, &Collective::AllReduce { reducer, output })
    }

    /// Each rank gets its rows of the reduction of all ranks' elements. `[size * n, ..]` to `[n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn reduce_scatter<A, Q>(
        &self,
        axis: A,
        reduction: Q,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        self.applied(axis, &Collective::ReduceScatter { reducer: reduction.reducer() })
    }

    /// The rank at `root` gets the reduction of all ranks' elements, the others nothing.
    ///
    /// # Errors
    /// As said above.
    pub fn reduce<A, Q>(
        &self,
        axis: A,
        root: usize,
        reduction: Q,
    ) -> Result<Option<With<Self, A, Varying>>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        let reducer = reduction.reducer();
        self.applied_by_some(axis, &Collective::Reduce { root, reducer })
    }

    /// Every rank gets all ranks' rows, and uses them in its own way. `[n, ..]` to `[size * n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn all_gather<A>(&self, axis: A) -> Result<With<Self, A, Replicate>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::AllGather { output: Copies::Replicate })
    }

    /// Every rank gets all ranks' rows, which count once. `[n, ..]` to `[size * n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn all_gather_invariant<A>(&self, axis: A) -> Result<With<Self, A, Invariant>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::AllGather { output: Copies::Invariant })
    }

    /// Every rank gets the elements of the rank at `root`, and uses them in its own way.
    ///
    /// # Errors
    /// As said above.
    pub fn broadcast<A>(&self, axis: A, root: usize) -> Result<With<Self, A, Replicate>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Broadcast { root, output: Copies::Replicate })
    }

    /// Every rank gets the elements of the rank at `root`, which count once.
    ///
    /// # Errors
    /// As said above.
    pub fn broadcast_invariant<A>(
        &self,
        axis: A,
        root: usize,
    ) -> Result<With<Self, A, Invariant>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Broadcast { root, output: Copies::Invariant })
    }

    /// The rank at `root` gets all ranks' rows, the others nothing. `[n, ..]` to `[size * n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn gather<A>(
        &self,
        axis: A,
        root: usize,
    ) -> Result<Option<With<Self, A, Varying>>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied_by_some(axis, &Collective::Gather { root })
    }

    /// Each rank gets its part of the rows of the rank at `root`. `[size * n, ..]`, of which only the root's elements
    /// are read, to `[n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn scatter<A>(&self, axis: A, root: usize) -> Result<With<Self, A, Varying>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Scatter { root })
    }

    /// Each rank gets the rows that each rank cut for it: `send[i]` rows go to rank `i`, `receive[i]` come from it.
    ///
    /// # Errors
    /// As said above.
    pub fn all_to_all<A>(
        &self,
        axis: A,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::AllToAll { send, receive })
    }

    /// Each rank sends its elements to the rank that `destinations` names for it, the same list on all ranks. A rank
    /// that receives none gets zeros.
    ///
    /// # Errors
    /// As said above.
    pub fn permute<A>(
        &self,
        axis: A,
        destinations: Vec<Option<usize>>,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Permute { destinations })
    }

    /// Sends this rank's elements to rank `to`, which calls [`receive`](Self::receive). Only these two ranks take part.
    ///
    /// # Errors
    /// As said above.
    pub fn send<A>(&self, axis: A, to: usize) -> Result<(), C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        let nothing: Option<With<Self, A, Varying>> =
            self.applied_by_some(axis, &Collective::Send { to })?;
        drop(nothing);
        Ok(())
    }

    /// Receives the elements that rank `from` sends with [`send`](Self::send), of this value's shape and dtype. This
    /// value's elements are not read. Only these two ranks take part.
    ///
    /// # Errors
    /// As said above.
    pub fn receive<A>(&self, axis: A, from: usize) -> Result<With<Self, A, Varying>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Receive { from })
    }

    /// Each rank gets the sum of the elements of the ranks up to and including itself.
    ///
    /// # Errors
    /// As said above.
    pub fn scan<A>(&self, axis: A) -> Result<With<Self, A, Varying>, C::Error>
    where
        A: MeshAxis,
        Self: Along<A, Carrier = C>,
        <Self as Along<A>>::State: Own,
    {
        self.applied(axis, &Collective::Scan)
    }

    /// Applies a collective of which every rank has an output.
    pub(super) fn applied<A, Q>(
        &self,
        axis: A,
        collective: &Collective,
    ) -> Result<With<Self, A, Q>, C::Error>
    where
        A: MeshAxis,
        Q: State,
        Self: Along<A, Carrier = C>,
    {
        let output = self.applied_by_some::<A, Q>(axis, collective)?;
        Ok(output.expect("every rank has an output of this collective"))
    }

    fn applied_by_some<A, Q>(
        &self,
        _: A,
        collective: &Collective,
    ) -> Result<Option<With<Self, A, Q>>, C::Error>
    where
        A: MeshAxis,
        Q: State,
        Self: Along<A, Carrier = C>,
    {
        Ok(self.tagged.apply(A::AXES, collective)?.map(Self::made))
    }

    pub(super) fn made<A, Q>(tagged: Tagged<C>) -> With<Self, A, Q>
    where
        A: MeshAxis,
        Q: State,
        Self: Along<A, Carrier = C>,
    {
        Made::made(tagged)
    }
}
