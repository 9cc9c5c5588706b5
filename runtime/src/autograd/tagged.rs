//! Values whose states are known at run time.

use super::operation::Collective;
use super::state::{Axes, AxisState, Hint};
use super::tape::{Carrier, Tape, TapeGradients};
use crate::error::Error;

/// A value with its state over the replicate axis and over the shard axis, checked when it is used.
///
/// [`Dist`](super::dist::Dist) is the same with the states as types, checked before anything runs:
/// prefer it. `Tagged` is for custom ops, and for states that come from outside.
#[derive(Debug)]
pub struct Tagged<C: Carrier> {
    tape: Tape<C>,
    tensor: C::Tensor,
    states: [AxisState; 2],
}

impl<C: Carrier> Clone for Tagged<C> {
    fn clone(&self) -> Self {
        Self { tape: self.tape.clone(), tensor: self.tensor.clone(), states: self.states }
    }
}

impl<C: Carrier> Tagged<C> {
    pub(super) fn new(tape: Tape<C>, tensor: C::Tensor, states: [AxisState; 2]) -> Self {
        Self { tape, tensor, states }
    }

    /// Returns this rank's tensor.
    #[must_use]
    pub fn tensor(&self) -> &C::Tensor {
        &self.tensor
    }

    /// Returns this rank's tensor.
    #[must_use]
    pub fn into_tensor(self) -> C::Tensor {
        self.tensor
    }

    /// Returns the states over the replicate axis and over the shard axis.
    #[must_use]
    pub fn states(&self) -> [AxisState; 2] {
        self.states
    }

    /// Returns the tape.
    #[must_use]
    pub fn tape(&self) -> &Tape<C> {
        &self.tape
    }

    /// Applies a collective or a conversion along an axis. Returns `None` where this rank has no
    /// output.
    ///
    /// **Collective** over the group of the axis. Parts are rows, along the first dim.
    ///
    /// # Errors
    /// [`Error::Collective`] if the value is not in the state that the collective takes; the errors
    /// of [`Carrier::apply`].
    pub fn apply(&self, axes: Axes, collective: &Collective) -> Result<Option<Self>, C::Error> {
        let [from, to] = collective.states();
        for place in axes.places() {
            let found = self.states[*place];
            if found != from {
                let problem = format!(
                    "it takes {} value along {axes}, this is {} one",
                    from.one(),
                    found.one()
                );
                return Err(self.refuse(collective.name(), problem, collective.hint()).into());
            }
        }
        if !collective.is_linear() {
            // Along the other axis, too, the collective is a function of the value.
            self.each(collective.name(), AxisState::mapped)?;
        }
        let output = self.tape.apply(axes, collective, &self.tensor)?;
        Ok(output.map(|tensor| self.with(tensor, self.states_with(axes, to))))
    }

    /// Returns the same elements in another state: a Replicate value as a Varying one, or a Varying
    /// one as a Partial one. Moves nothing, neither here nor in the backward.
    ///
    /// # Errors
    /// [`Error::Collective`] for any other pair of states; the errors of [`Carrier::alias`].
    pub fn reinterpret(&self, axes: Axes, to: AxisState) -> Result<Self, C::Error> {
        for place in axes.places() {
            let found = self.states[*place];
            found.reinterpreted(to).map_err(|hint| {
                let problem = format!("{} value along {axes} is not {} one", found.one(), to.one());
                self.refuse("reinterpret", problem, hint)
            })?;
        }
        // Another tensor: the same one would have one gradient in two states.
        Ok(self.with(C::alias(&self.tensor)?, self.states_with(axes, to)))
    }

    /// Applies any function to the tensor. A Partial value is refused.
    ///
    /// # Errors
    /// [`Error::Collective`] if the value is Partial along an axis; the error of `function`.
    pub fn map(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        self.each("map", AxisState::mapped)?;
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
        Ok(self.with(function(&self.tensor)?, self.states))
    }

    /// Applies any function to two tensors. Partial values are refused, and an Invariant value with
    /// one in another state.
    ///
    /// # Errors
    /// [`Error::Collective`] if the states do not allow it, or the values are on two tapes; the
    /// error of `function`.
    pub fn zip(
        &self,
        other: &Self,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        let states = self.both("zip", other, AxisState::joined)?;
        Ok(self.with(function(&self.tensor, &other.tensor)?, states))
    }

    /// Applies a function that is linear in two tensors together, such as their sum. The caller
    /// guarantees that.
    ///
    /// # Errors
    /// As [`zip`](Self::zip).
    pub fn zip_sum(
        &self,
        other: &Self,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        let states = self.both("zip_sum", other, AxisState::added)?;
        Ok(self.with(function(&self.tensor, &other.tensor)?, states))
    }

    /// Applies a function that is linear in each of two tensors, such as their product. The caller
    /// guarantees that.
    ///
    /// # Errors
    /// As [`zip`](Self::zip).
    pub fn zip_product(
        &self,
        other: &Self,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        let states = self.both("zip_product", other, AxisState::multiplied)?;
        Ok(self.with(function(&self.tensor, &other.tensor)?, states))
    }

    /// Runs the backward from this loss, a scalar, through every collective of its tape.
    ///
    /// **Collective**: over all groups of the tape's collectives, in the reverse of their order.
    ///
    /// # Errors
    /// [`Error::Collective`] if the loss is neither Partial nor Invariant along an axis;
    /// [`Error::Collective`] if its tape records nothing; the errors of [`Carrier::backward`].
    pub fn backward(&self) -> Result<TapeGradients<C>, C::Error> {
        self.each("backward", AxisState::as_loss)?;
        self.tape.backward(&self.tensor)
    }

    /// Checks that these are the states.
    pub(super) fn expect(&self, states: [AxisState; 2]) -> Result<(), Error> {
        for ((found, state), axis) in
            self.states.into_iter().zip(states).zip([Axes::Replicate, Axes::Shard])
        {
            if found != state {
                let problem = format!(
                    "the type says {} value along {axis}, this is {} one",
                    state.one(),
                    found.one()
                );
                return Err(self.refuse("try_from", problem, "convert it, or name another type"));
            }
        }
        Ok(())
    }

    fn with(&self, tensor: C::Tensor, states: [AxisState; 2]) -> Self {
        Self { tape: self.tape.clone(), tensor, states }
    }

    fn states_with(&self, axes: Axes, to: AxisState) -> [AxisState; 2] {
        let mut states = self.states;
        axes.places().iter().for_each(|place| states[*place] = to);
        states
    }

    fn each(
        &self,
        operation: &'static str,
        rule: impl Fn(AxisState) -> Result<AxisState, Hint>,
    ) -> Result<(), Error> {
        for (state, axis) in self.states.into_iter().zip([Axes::Replicate, Axes::Shard]) {
            rule(state).map_err(|hint| {
                self.refuse(operation, format!("this is {} value along {axis}", state.one()), hint)
            })?;
        }
        Ok(())
    }

    fn both(
        &self,
        operation: &'static str,
        other: &Self,
        rule: impl Fn(AxisState, AxisState) -> Result<AxisState, Hint>,
    ) -> Result<[AxisState; 2], Error> {
        if !self.tape.is(&other.tape) {
            let problem = "these are values of two tapes".to_owned();
            return Err(self.refuse(
                operation,
                problem,
                "make both values on one tape; take a gradient off its tape by into_tensor",
            ));
        }
        let mut states = self.states;
        for (place, axis) in [Axes::Replicate, Axes::Shard].into_iter().enumerate() {
            let [one, two] = [self.states[place], other.states[place]];
            states[place] = rule(one, two).map_err(|hint| {
                let problem =
                    format!("these are {} and {} value along {axis}", one.one(), two.one());
                self.refuse(operation, problem, hint)
            })?;
        }
        Ok(states)
    }

    fn refuse(&self, operation: &'static str, problem: String, hint: Hint) -> Error {
        let rank = self.tape.group(Axes::Both).rank();
        Error::Collective { operation, rank, what: format!("{problem}: {hint}") }
    }
}

impl<C: Carrier> Tape<C> {
    /// Makes a value as [`assume`](Self::assume) does, with states that are known at run time: over
    /// the replicate axis, and over the shard axis.
    #[must_use]
    pub fn tag(&self, tensor: C::Tensor, states: [AxisState; 2]) -> Tagged<C> {
        Tagged::new(self.clone(), tensor, states)
    }
}

impl<C: Carrier> TapeGradients<C> {
    /// Returns the gradient as [`of`](Self::of) does, for a value whose states are known at run
    /// time.
    #[must_use]
    pub fn of_tagged(&self, value: &Tagged<C>) -> Option<Tagged<C>> {
        let gradient = C::gradient(&self.gradients, value.tensor())?;
        Some(self.tape().tag(gradient, value.states().map(AxisState::cotangent)))
    }
}
