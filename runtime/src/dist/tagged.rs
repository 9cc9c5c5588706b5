//! Values whose states are known at run time.

use super::axis::Axes;
use super::carrier::Carrier;
use super::state::AxisState;
use super::tape::{Gradients, Tape};
use super::transitions::Hint;
use crate::collective::Collective;
use crate::error::Error;

/// A value with its state over the replicate axis and over the shard axis, checked when it is used.
///
/// [`Dist`](super::Dist) is the same with the states as types, checked before anything runs: prefer it. This is for ops of
/// one's own and for states that come from outside.
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

    /// This rank's tensor.
    #[must_use]
    pub fn tensor(&self) -> &C::Tensor {
        &self.tensor
    }

    /// This rank's tensor.
    #[must_use]
    pub fn into_tensor(self) -> C::Tensor {
        self.tensor
    }

    /// The states over the replicate axis and over the shard axis.
    #[must_use]
    pub fn states(&self) -> [AxisState; 2] {
        self.states
    }

    /// The tape.
    #[must_use]
    pub fn tape(&self) -> &Tape<C> {
        &self.tape
    }
}

impl<C: Carrier> Tagged<C> {
    /// Applies a collective or a conversion along an axis; `None` where this rank has no output.
    ///
    /// **Collective** over the group of the axis. Parts are rows: of the first dim.
    ///
    /// # Errors
    /// [`Error::State`] if the value is not in the state that the collective takes; what [`Carrier::apply`] fails with.
    pub fn apply(&self, axes: Axes, collective: &Collective) -> Result<Option<Self>, C::Error> {
        let [from, to] = collective.states();
        for place in axes.places() {
            let found = self.states[*place];
            if found != from {
                let (found, from) = (found.one(), from.one());
                let problem = format!("{found} value along {axes}, where it takes {from} one");
                return Err(self.refuse(collective.name(), problem, collective.hint()).into());
            }
        }
        if !collective.is_linear() {
            // Along the other axis, too, it is a function of the value.
            self.each(collective.name(), AxisState::mapped)?;
        }
        let output = self.tape.apply(axes, collective, &self.tensor)?;
        Ok(output.map(|tensor| self.with(tensor, self.states_with(axes, to))))
    }

    /// The same elements, taken for something else: a Replicate value for a Varying one, a Varying one for a Partial one.
    /// Moves nothing, in the backward neither.
    ///
    /// # Errors
    /// [`Error::State`] if it is no such pair of states.
    pub fn reinterpret(&self, axes: Axes, to: AxisState) -> Result<Self, C::Error> {
        for place in axes.places() {
            let found = self.states[*place];
            found.reinterpreted(to).map_err(|hint| {
                let problem = format!("{} value along {axes} as {} one", found.one(), to.one());
                self.refuse("reinterpret", problem, hint)
            })?;
        }
        // Another tensor: as the same one it would have one gradient in two states.
        Ok(self.with(C::alias(&self.tensor)?, self.states_with(axes, to)))
    }

    /// Any function of the tensor. Not of a Partial value.
    ///
    /// # Errors
    /// [`Error::State`]; what `function` fails with.
    pub fn map(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        self.each("map", AxisState::mapped)?;
        self.map_linear(function)
    }

    /// A function of the tensor that is linear: of which the sum of the outputs is the output of the sum. The caller answers
    /// for that.
    ///
    /// # Errors
    /// What `function` fails with.
    pub fn map_linear(
        &self,
        function: impl FnOnce(&C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        Ok(self.with(function(&self.tensor)?, self.states))
    }

    /// Any function of two tensors. Not of Partial values, nor of an Invariant and another one.
    ///
    /// # Errors
    /// [`Error::State`]; what `function` fails with.
    pub fn zip(
        &self,
        other: &Self,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        let states = self.both("zip", other, AxisState::joined)?;
        Ok(self.with(function(&self.tensor, &other.tensor)?, states))
    }

    /// A function that is linear in two tensors together, such as their sum. The caller answers for that.
    ///
    /// # Errors
    /// [`Error::State`]; what `function` fails with.
    pub fn zip_sum(
        &self,
        other: &Self,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        let states = self.both("zip_sum", other, AxisState::added)?;
        Ok(self.with(function(&self.tensor, &other.tensor)?, states))
    }

    /// A function that is linear in each of two tensors, such as their product. The caller answers for that.
    ///
    /// # Errors
    /// [`Error::State`]; what `function` fails with.
    pub fn zip_product(
        &self,
        other: &Self,
        function: impl FnOnce(&C::Tensor, &C::Tensor) -> Result<C::Tensor, C::Error>,
    ) -> Result<Self, C::Error> {
        let states = self.both("zip_product", other, AxisState::multiplied)?;
        Ok(self.with(function(&self.tensor, &other.tensor)?, states))
    }

    /// Goes back from this loss, a scalar, through every collective of its tape.
    ///
    /// **Collective**: over all groups of the tape's collectives, in the reverse of their order.
    ///
    /// # Errors
    /// [`Error::State`] if it is neither Partial nor Invariant along an axis; what [`Carrier::backward`] fails with.
    pub fn backward(&self) -> Result<Gradients<C>, C::Error> {
        self.each("backward", AxisState::as_loss)?;
        self.tape.backward(&self.tensor)
    }

    /// Whether these are the states.
    pub(super) fn expect(&self, states: [AxisState; 2]) -> Result<(), Error> {
        for ((found, state), axis) in
            self.states.into_iter().zip(states).zip([Axes::Replicate, Axes::Shard])
        {
            if found != state {
                let (found, state) = (found.one(), state.one());
                let problem = format!("{found} value along {axis}, where {state} one is meant");
                return Err(self.refuse("try_from", problem, "convert it, or mean another type"));
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
                self.refuse(operation, format!("{} value along {axis}", state.one()), hint)
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
            let problem = "values of two tapes".to_owned();
            return Err(self.refuse(
                operation,
                problem,
                "make both values on one tape; a gradient goes with values as into_tensor",
            ));
        }
        let mut states = self.states;
        for (place, axis) in [Axes::Replicate, Axes::Shard].into_iter().enumerate() {
            let [one, two] = [self.states[place], other.states[place]];
            states[place] = rule(one, two).map_err(|hint| {
                let problem = format!("{} and {} value along {axis}", one.one(), two.one());
                self.refuse(operation, problem, hint)
            })?;
        }
        Ok(states)
    }

    fn refuse(&self, operation: &'static str, problem: String, hint: Hint) -> Error {
        let rank = self.tape.group(Axes::Both).rank();
        Error::State { operation, rank, problem, hint }
    }
}
