//! Stochastic gradient descent with momentum, in candle.

use candle_core::{Result, Tensor};

use super::model::Parameters;

const LEARNING_RATE: f64 = 0.01;
const MOMENTUM: f64 = 0.9;

/// The state of the optimizer: the velocity of each parameter, after the first update.
#[derive(Debug, Default)]
pub(crate) struct Sgd {
    velocities: Option<[Tensor; 4]>,
}

impl Sgd {
    /// One update.
    pub(crate) fn step(&mut self, parameters: &Parameters, gradients: [Tensor; 4]) -> Result<()> {
        let mut velocities = gradients;
        if let Some(before) = self.velocities.take() {
            for (velocity, before) in velocities.iter_mut().zip(before) {
                *velocity = (&*velocity + (before * MOMENTUM)?)?;
            }
        }
        for (parameter, velocity) in parameters.0.iter().zip(&velocities) {
            parameter.set(&(parameter.as_tensor().detach() - (velocity * LEARNING_RATE)?)?)?;
        }
        self.velocities = Some(velocities);
        Ok(())
    }
}
