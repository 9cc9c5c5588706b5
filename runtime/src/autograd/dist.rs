//! Values with a type on each axis of the mesh, so that a wrong collective does not compile.
//!
//! Each rank along an axis holds a value. The value's state on that axis says how these values
//! relate to each other:
//!
//! | state | the ranks hold | its cotangents are |
//! |---|---|---|
//! | [`Replicate`] | the same value; each rank uses it in its own way | [`Partial`]: they add up |
//! | [`Invariant`] | the same value; all ranks use it in the same way, so it counts once | [`Invariant`] |
//! | [`Varying`] | different values | [`Varying`] |
//! | [`Partial`] | terms of a sum that is not computed yet | [`Replicate`] |
//!
//! A [`Dist<C, R, S>`](Dist) has state `R` over the replicate axis and `S` over the shard axis. Its
//! methods keep the sum of all ranks' losses differentiable: collectives and conversions move
//! between states, and a function of values is allowed only in the states in which its result is
//! right.
//!
//! | method | from | to | backward |
//! |---|---|---|---|
//! | [`all_reduce`](Dist::all_reduce) of a sum | Partial | Replicate | all_reduce |
//! | [`all_reduce_invariant`](Dist::all_reduce_invariant) of a sum | Partial | Invariant | nothing |
//! | the same of product, min, max | Varying | Replicate, Invariant | all_reduce, nothing; then an exchange of the other ranks' elements |
//! | [`all_gather`](Dist::all_gather) | Varying | Replicate | reduce_scatter |
//! | [`all_gather_invariant`](Dist::all_gather_invariant) | Varying | Invariant | the own part |
//! | [`reduce_scatter`](Dist::reduce_scatter) of a sum | Partial | Varying | all_gather |
//! | [`share`](Dist::share) | Invariant | Replicate | all_reduce |
//! | [`to_varying`](Dist::to_varying) | Replicate | Varying | nothing |
//! | [`to_partial`](Dist::to_partial) | Varying | Partial | nothing |
//! | [`slice`](Dist::slice) | Replicate, Invariant | Varying | zeros elsewhere, all_gather |
//! | [`place`](Dist::place) | Varying | Partial | the own part |
//! | [`only_first`](Dist::only_first) | Replicate | Partial | zeros but on the first rank |
//! | all_to_all, permute, send, receive, scan, broadcast, gather, scatter, reduce | | | the opposite direction |
//!
//! [`backward`](Dist::backward) takes a Partial loss, which is a term of one sum on each rank, or
//! an Invariant loss, which all ranks hold and which counts once. A Replicate loss would count once
//! for each rank. That is PyTorch issue 58005, and does not compile.
//!
//! The states are those of the types of JAX's `shard_map` with `check_vma`, and of PyTorch's
//! `spmd_types`, which names them R, I, V and P.
//!
//! In reading order: `operation` (the collectives), `state` (the states, and the operations that
//! they allow), `tape` (the interface to an autograd, and the order of backwards), and here the
//! values.

use std::fmt;
use std::marker::PhantomData;

use super::operation::{Collective, Copies};
pub use super::state::{
    Adds, Avg, Axes, Copied, CountedOnce, DistState, Free, Invariant, Joins, Loss, Max, MeshAxis,
    Min, Multiplies, OnBoth, OnReplicate, OnShard, Own, Partial, PreMultiplied, Product, Reduces,
    Replicate, Sliced, Sum, Varying,
};
pub use super::tape::{Applied, Carrier, CarrierCall, Recording, Tape, TapeGradients};
use crate::error::Error;

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
    type State: DistState;

    /// The value's state along the other axis; the same state if `A` is the whole mesh.
    type Beside: DistState;

    /// The value in state `Q` along `A`.
    type With<Q: DistState>;

    /// Makes a value of `tensor` on the tape of this value, in state `Q` along `A`, and in this
    /// value's state along the other axis. Does not check the states, as [`Tape::assume`] does not.
    #[doc(hidden)]
    fn with<Q: DistState>(&self, tensor: <Self::Carrier as Carrier>::Tensor) -> Self::With<Q>;
}

/// A value in state `R` over the replicate axis and `S` over the shard axis. See the
/// [module](self).
///
/// [`Tape::assume`] makes one of a tensor, and [`into_tensor`](Self::into_tensor) gives the tensor
/// back.
pub struct Dist<C: Carrier, R, S> {
    tape: Tape<C>,
    tensor: C::Tensor,
    states: PhantomData<(R, S)>,
}

impl<C: Carrier, R: DistState, S: DistState> Dist<C, R, S> {
    /// Returns this rank's tensor.
    #[must_use]
    pub fn tensor(&self) -> &C::Tensor {
        &self.tensor
    }

    /// Returns this rank's tensor. Its further use is not checked.
    #[must_use]
    pub fn into_tensor(self) -> C::Tensor {
        self.tensor
    }

    /// Returns the tape.
    #[must_use]
    pub fn tape(&self) -> &Tape<C> {
        &self.tape
    }
}

impl<C: Carrier, R: DistState, S: DistState> Along<OnReplicate> for Dist<C, R, S> {
    type Carrier = C;
    type State = R;
    type Beside = S;
    type With<Q: DistState> = Dist<C, Q, S>;

    fn with<Q: DistState>(&self, tensor: C::Tensor) -> Dist<C, Q, S> {
        self.tape.assume(tensor)
    }
}

impl<C: Carrier, R: DistState, S: DistState> Along<OnShard> for Dist<C, R, S> {
    type Carrier = C;
    type State = S;
    type Beside = R;
    type With<Q: DistState> = Dist<C, R, Q>;

    fn with<Q: DistState>(&self, tensor: C::Tensor) -> Dist<C, R, Q> {
        self.tape.assume(tensor)
    }
}

impl<C: Carrier, Q: DistState> Along<OnBoth> for Dist<C, Q, Q> {
    type Carrier = C;
    type State = Q;
    type Beside = Q;
    type With<P: DistState> = Dist<C, P, P>;

    fn with<P: DistState>(&self, tensor: C::Tensor) -> Dist<C, P, P> {
        self.tape.assume(tensor)
    }
}

/// The result of a method of `D` along `A`, in state `Q` there.
type With<D, A, Q> = <D as Along<A>>::With<Q>;

/// # Collectives
///
/// All are **collective** over the ranks along the axis, in the same order on all of them, and so
/// are their backwards. Parts are rows, equal and in rank order; a root is an index along the axis.
///
/// All have the errors of [`Carrier::apply`], and [`Error::Collective`] if the value does not
/// fit.
impl<C: Carrier, R: DistState, S: DistState> Dist<C, R, S> {
    /// Gives every rank the reduction of all ranks' elements, which each uses in its own way.
    ///
    /// # Errors
    /// As said above.
    pub fn all_reduce<A: MeshAxis, Q>(
        &self,
        axis: A,
        reduction: Q,
    ) -> Result<With<Self, A, Replicate>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        let reducer = reduction.reducer();
        self.applied(axis, &Collective::AllReduce { reducer, output: Copies::Replicate })
    }

    /// Gives every rank the reduction of all ranks' elements, which counts once.
    ///
    /// # Errors
    /// As said above.
    pub fn all_reduce_invariant<A: MeshAxis, Q>(
        &self,
        axis: A,
        reduction: Q,
    ) -> Result<With<Self, A, Invariant>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        let reducer = reduction.reducer();
        self.applied(axis, &Collective::AllReduce { reducer, output: Copies::Invariant })
    }

    /// Gives each rank its rows of the reduction of all ranks' elements. `[size * n, ..]` to `[n,
    /// ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn reduce_scatter<A: MeshAxis, Q>(
        &self,
        axis: A,
        reduction: Q,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        self.applied(axis, &Collective::ReduceScatter { reducer: reduction.reducer() })
    }

    /// Gives the rank at `root` the reduction of all ranks' elements, and the others nothing.
    ///
    /// # Errors
    /// As said above.
    pub fn reduce<A: MeshAxis, Q>(
        &self,
        axis: A,
        root: usize,
        reduction: Q,
    ) -> Result<Option<With<Self, A, Varying>>, C::Error>
    where
        Self: Along<A, Carrier = C>,
        Q: Reduces<<Self as Along<A>>::State, <Self as Along<A>>::Beside>,
    {
        let reducer = reduction.reducer();
        self.applied_by_some(axis, &Collective::Reduce { root, reducer })
    }

    /// Gives every rank all ranks' rows, which each uses in its own way. `[n, ..]` to `[size * n,
    /// ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn all_gather<A: MeshAxis>(&self, axis: A) -> Result<With<Self, A, Replicate>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::AllGather { output: Copies::Replicate })
    }

    /// Gives every rank all ranks' rows, which count once. `[n, ..]` to `[size * n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn all_gather_invariant<A: MeshAxis>(
        &self,
        axis: A,
    ) -> Result<With<Self, A, Invariant>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::AllGather { output: Copies::Invariant })
    }

    /// Gives every rank the elements of the rank at `root`, which each uses in its own way.
    ///
    /// # Errors
    /// As said above.
    pub fn broadcast<A: MeshAxis>(
        &self,
        axis: A,
        root: usize,
    ) -> Result<With<Self, A, Replicate>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Broadcast { root, output: Copies::Replicate })
    }

    /// Gives every rank the elements of the rank at `root`, which count once.
    ///
    /// # Errors
    /// As said above.
    pub fn broadcast_invariant<A: MeshAxis>(
        &self,
        axis: A,
        root: usize,
    ) -> Result<With<Self, A, Invariant>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Broadcast { root, output: Copies::Invariant })
    }

    /// Gives the rank at `root` all ranks' rows, and the others nothing. `[n, ..]` to `[size * n,
    /// ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn gather<A: MeshAxis>(
        &self,
        axis: A,
        root: usize,
    ) -> Result<Option<With<Self, A, Varying>>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied_by_some(axis, &Collective::Gather { root })
    }

    /// Gives each rank its part of the rows of the rank at `root`. `[size * n, ..]`, where only
    /// the root's elements are read, to `[n, ..]`.
    ///
    /// # Errors
    /// As said above.
    pub fn scatter<A: MeshAxis>(
        &self,
        axis: A,
        root: usize,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Scatter { root })
    }

    /// Gives each rank the rows that each rank cut for it: `send[i]` rows go to rank `i`,
    /// `receive[i]` come from it.
    ///
    /// # Errors
    /// As said above.
    pub fn all_to_all<A: MeshAxis>(
        &self,
        axis: A,
        send: Vec<usize>,
        receive: Vec<usize>,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::AllToAll { send, receive })
    }

    /// Sends each rank's elements to the rank that `destinations` names for it, the same list on
    /// all ranks. A rank that receives none gets zeros.
    ///
    /// # Errors
    /// As said above.
    pub fn permute<A: MeshAxis>(
        &self,
        axis: A,
        destinations: Vec<Option<usize>>,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Permute { destinations })
    }

    /// Sends this rank's elements to rank `to`, which calls [`receive`](Self::receive). Only these
    /// two ranks take part.
    ///
    /// # Errors
    /// As said above.
    pub fn send<A: MeshAxis>(&self, _axis: A, to: usize) -> Result<(), C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.tape.apply(A::AXES, &Collective::Send { to }, &self.tensor).map(drop)
    }

    /// Receives the elements that rank `from` sends with [`send`](Self::send), of this value's
    /// shape and dtype. This value's elements are not read. Only these two ranks take part.
    ///
    /// # Errors
    /// As said above.
    pub fn receive<A: MeshAxis>(
        &self,
        axis: A,
        from: usize,
    ) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Receive { from })
    }

    /// Gives each rank the sum of the elements of the ranks up to and including itself.
    ///
    /// # Errors
    /// As said above.
    pub fn scan<A: MeshAxis>(&self, axis: A) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Scan)
    }

    /// Applies a collective that has an output on every rank.
    fn applied<A: MeshAxis, Q: DistState>(
        &self,
        axis: A,
        collective: &Collective,
    ) -> Result<With<Self, A, Q>, C::Error>
    where
        Self: Along<A, Carrier = C>,
    {
        let output = self.applied_by_some::<A, Q>(axis, collective)?;
        Ok(output.expect("every rank has an output of this collective"))
    }

    fn applied_by_some<A: MeshAxis, Q: DistState>(
        &self,
        _: A,
        collective: &Collective,
    ) -> Result<Option<With<Self, A, Q>>, C::Error>
    where
        Self: Along<A, Carrier = C>,
    {
        let output = self.tape.apply(A::AXES, collective, &self.tensor)?;
        Ok(output.map(|tensor| Along::<A>::with(self, tensor)))
    }
}

/// # Conversions
///
/// All go along one axis. A conversion whose backward is a collective is recorded as one. These
/// methods are **collective** in that sense, in the same order on all ranks.
impl<C: Carrier, R: DistState, S: DistState> Dist<C, R, S> {
    /// Converts a Replicate value to a Varying one. The same elements; the backward moves nothing.
    ///
    /// # Errors
    /// Only those of the autograd.
    pub fn to_varying<A: MeshAxis>(&self, _: A) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Copied>,
    {
        self.reinterpreted::<A, Varying>()
    }

    /// Converts a Varying value to a Partial one, the terms of a sum. The same elements; the
    /// backward moves nothing.
    ///
    /// # Errors
    /// Only those of the autograd.
    pub fn to_partial<A: MeshAxis>(&self, _: A) -> Result<With<Self, A, Partial>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.reinterpreted::<A, Partial>()
    }

    /// Converts an Invariant value to a Replicate one, which each rank uses in its own way. The
    /// same elements; the backward is an all_reduce.
    ///
    /// # Errors
    /// Errors of [`Carrier::apply`].
    pub fn share<A: MeshAxis>(&self, axis: A) -> Result<With<Self, A, Replicate>, C::Error>
    where
        Self: Along<A, Carrier = C, State: CountedOnce>,
    {
        self.applied(axis, &Collective::Share)
    }

    /// Keeps each rank's own rows of a value that all ranks hold. `[size * n, ..]` to `[n, ..]`.
    ///
    /// The backward of an Invariant value is an all_gather; that of a Replicate one moves nothing.
    ///
    /// # Errors
    /// [`Error::Collective`] if the ranks cannot share the rows evenly; those of
    /// [`Carrier::apply`].
    pub fn slice<A: MeshAxis>(&self, axis: A) -> Result<With<Self, A, Varying>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Sliced>,
    {
        let input = <<Self as Along<A>>::State as Sliced>::COPIES;
        self.applied(axis, &Collective::Slice { input })
    }

    /// Makes each rank's rows its part of a whole whose other rows are zeros: a term of the sum
    /// that all_gather would make. `[n, ..]` to `[size * n, ..]`.
    ///
    /// # Errors
    /// Errors of [`Carrier::apply`].
    pub fn place<A: MeshAxis>(&self, axis: A) -> Result<With<Self, A, Partial>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Own>,
    {
        self.applied(axis, &Collective::Place)
    }

    /// Keeps the first rank's copy, and zeros elsewhere: terms of a sum in which the value
    /// counts once.
    ///
    /// # Errors
    /// Errors of [`Carrier::apply`].
    pub fn only_first<A: MeshAxis>(&self, axis: A) -> Result<With<Self, A, Partial>, C::Error>
    where
        Self: Along<A, Carrier = C, State: Copied>,
    {
        self.applied(axis, &Collective::OnlyFirst)
    }

    fn reinterpreted<A: MeshAxis, Q: DistState>(&self) -> Result<With<Self, A, Q>, C::Error>
    where
        Self: Along<A, Carrier = C>,
    {
        // Another tensor: the same one would have one gradient in two states.
        Ok(Along::<A>::with(self, C::alias(&self.tensor)?))
    }
}

/// # Functions of values
///
/// Each rank applies them to its own tensor. The captures of a closure are not checked: it should
/// use no other distributed tensor than its arguments, and nothing that differs from rank to rank,
/// except where the output is Varying. A value that a rank multiplies by a factor of its own must
/// be Varying: use [`to_varying`](Self::to_varying), or a factor that is a Varying value.
impl<C: Carrier, R: DistState, S: DistState> Dist<C, R, S> {
    /// Applies any function to the tensor. A Partial value is refused: the result would be the
    /// function of a term.
    ///
    /// # Errors
    /// The error of `function`.
    pub fn map(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error>
    where
        R: Free,
        S: Free,
    {
        self.map_linear(function)
    }

    /// Applies a linear function to the tensor: the sum of its outputs is its output for the sum.
    /// The caller guarantees that.
    ///
    /// # Errors
    /// The error of `function`.
    pub fn map_linear(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        Ok(self.tape.assume(function(&self.tensor)?))
    }

    /// Applies any function to two tensors.
    ///
    /// # Errors
    /// [`Error::Collective`] if the values are on two tapes; the error of `function`.
    pub fn zip<R2, S2>(
        &self,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Dist<C, R2::Output, S2::Output>, C::Error>
    where
        R2: Joins<R>,
        S2: Joins<S>,
    {
        Ok(self.tape.assume(self.both("zip", other, function)?))
    }

    /// Applies a function that is linear in two tensors together, such as their sum. The caller
    /// guarantees that.
    ///
    /// # Errors
    /// As [`zip`](Self::zip).
    pub fn zip_sum<R2, S2>(
        &self,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Dist<C, R2::Output, S2::Output>, C::Error>
    where
        R2: Adds<R>,
        S2: Adds<S>,
    {
        Ok(self.tape.assume(self.both("zip_sum", other, function)?))
    }

    /// Applies a function that is linear in each of two tensors, such as their product. The caller
    /// guarantees that.
    ///
    /// # Errors
    /// As [`zip`](Self::zip).
    pub fn zip_product<R2, S2>(
        &self,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Dist<C, R2::Output, S2::Output>, C::Error>
    where
        R2: Multiplies<R>,
        S2: Multiplies<S>,
    {
        Ok(self.tape.assume(self.both("zip_product", other, function)?))
    }

    /// Applies a function to the tensors of two values. Refuses values of two tapes.
    fn both<R2: DistState, S2: DistState>(
        &self,
        operation: &'static str,
        other: &Dist<C, R2, S2>,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<C::Tensor, C::Error> {
        if !self.tape.is(&other.tape) {
            let rank = self.tape.group(Axes::Both).rank();
            let what = "these are values of two tapes: make both values on one tape; take a \
                        gradient off its tape by into_tensor"
                .to_owned();
            return Err(Error::Collective { operation, rank, what }.into());
        }
        function(&self.tensor, &other.tensor)
    }
}

impl<C: Carrier, R: DistState, S: DistState> Dist<C, R, S> {
    /// Runs the backward from this loss, a scalar, through every collective of its tape.
    ///
    /// A Partial loss is a term of the global loss, which is the sum of all ranks' terms. An
    /// Invariant one is the global loss, which all ranks hold.
    ///
    /// **Collective**: over all groups of the tape's collectives, in the reverse of their order,
    /// whatever the loss depends on.
    ///
    /// # Errors
    /// [`Error::Collective`] if its tape records nothing; the errors of [`Carrier::backward`].
    pub fn backward(&self) -> Result<TapeGradients<C>, C::Error>
    where
        R: Loss,
        S: Loss,
    {
        self.tape.backward(&self.tensor)
    }
}

impl<C: Carrier> Tape<C> {
    /// Makes a value of `tensor`, in the states that the caller names: `R` over the replicate axis,
    /// `S` over the shard axis.
    ///
    /// The states are not checked: ranks whose Replicate values differ compute different results.
    #[must_use]
    pub fn assume<R: DistState, S: DistState>(&self, tensor: C::Tensor) -> Dist<C, R, S> {
        Dist { tape: self.clone(), tensor, states: PhantomData }
    }
}

impl<C: Carrier> TapeGradients<C> {
    /// Returns the gradient of `value`, in the state of its cotangents; `None` if the loss does not
    /// depend on it on this rank, or if the autograd has not kept it.
    ///
    /// For a Replicate value each rank has its own term (Partial), which needs an all_reduce before
    /// an optimizer uses it. For an Invariant value all ranks have the whole gradient.
    #[must_use]
    pub fn of<R: DistState, S: DistState>(
        &self,
        value: &Dist<C, R, S>,
    ) -> Option<Dist<C, R::Cotangent, S::Cotangent>> {
        C::gradient(&self.gradients, &value.tensor).map(|gradient| self.tape().assume(gradient))
    }
}

impl<C: Carrier, R, S> Clone for Dist<C, R, S> {
    fn clone(&self) -> Self {
        Self { tape: self.tape.clone(), tensor: self.tensor.clone(), states: PhantomData }
    }
}

impl<C: Carrier, R: DistState, S: DistState> fmt::Debug for Dist<C, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dist<{}, {}>({:?})", R::NAME, S::NAME, self.tensor)
    }
}
