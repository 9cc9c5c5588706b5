//! A perceptron with one hidden layer, its backward written by hand, and the items that it learns.

use hsdp::{ModelSpec, Param};
use hsdp_tests::support::models::layer;

use crate::parity::Named;

/// Odd sizes, so that parameters straddle shards and shards end in padding.
const INPUTS: usize = 7;
const HIDDEN: usize = 13;
const OUTPUTS: usize = 5;

/// Two units: `hidden` and `output`.
pub(crate) fn spec() -> ModelSpec {
    ModelSpec::new()
        .unit(layer("hidden", [HIDDEN, INPUTS]))
        .unit(layer("output", [OUTPUTS, HIDDEN]))
}

/// The value that a parameter starts from.
pub(crate) fn initial(param: &Param) -> Vec<f32> {
    (0..param.numel()).map(|index| 0.4 * wave(index + 31 * param.name.len())).collect()
}

/// Numbers in -1..1 that look arbitrary.
fn wave(index: usize) -> f32 {
    (f32::from(u16::try_from(index % 60_000).expect("below 60000")) * 1.7 + 0.3).sin()
}

/// The items of one rank in one microbatch, by number.
pub(crate) type Items = std::ops::Range<usize>;

/// A layer's parameters, lent by a gathered unit or by whole parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer<'a> {
    pub(crate) weight: &'a [f32],
    pub(crate) bias: &'a [f32],
}

impl<'a> Layer<'a> {
    /// The layer `name` of whole parameters.
    pub(crate) fn of(parameters: &'a Named, name: &str) -> Self {
        let tensor = |kind: &str| parameters[&format!("{name}.{kind}")].as_slice();
        Self { weight: tensor("weight"), bias: tensor("bias") }
    }

    /// `weight x + bias`.
    fn apply(self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(x.len()).zip(self.bias);
        rows.map(|(row, bias)| row.iter().zip(x).map(|(weight, x)| weight * x).sum::<f32>() + bias)
            .collect()
    }

    /// The derivative by `x`, from the derivative by the result.
    fn pull(self, upstream: &[f32]) -> Vec<f32> {
        let columns = self.weight.len() / upstream.len();
        let column = |index: usize| {
            let weights = self.weight.iter().skip(index).step_by(columns);
            weights.zip(upstream).map(|(weight, upstream)| weight * upstream).sum()
        };
        (0..columns).map(column).collect()
    }
}

/// A layer's gradients.
#[derive(Debug)]
pub(crate) struct LayerGradient {
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Vec<f32>,
}

impl LayerGradient {
    fn zeros(rows: usize, columns: usize) -> Self {
        Self { weight: vec![0.0; rows * columns], bias: vec![0.0; rows] }
    }

    fn add(&mut self, upstream: &[f32], x: &[f32]) {
        for ((row, bias), upstream) in
            self.weight.chunks_exact_mut(x.len()).zip(&mut self.bias).zip(upstream)
        {
            for (weight, x) in row.iter_mut().zip(x) {
                *weight += upstream * x;
            }
            *bias += upstream;
        }
    }
}

/// The activations of some items, between forward and backward.
#[derive(Debug)]
pub(crate) struct Activations {
    items: Items,
    hidden: Vec<Vec<f32>>,
    outputs: Vec<Vec<f32>>,
}

impl Activations {
    /// Runs the first layer.
    pub(crate) fn hidden(layer: Layer<'_>, items: Items) -> Self {
        let hidden = |item| layer.apply(&input(item)).into_iter().map(f32::tanh).collect();
        Self { hidden: items.clone().map(hidden).collect(), outputs: Vec::new(), items }
    }

    /// Runs the second layer; gives the sum of the items' losses, each half the squared error.
    pub(crate) fn output(&mut self, layer: Layer<'_>) -> f64 {
        self.outputs = self.hidden.iter().map(|hidden| layer.apply(hidden)).collect();
        let errors =
            self.items.clone().zip(&self.outputs).flat_map(|(item, output)| error(item, output));
        errors.map(|error| f64::from(error) * f64::from(error) / 2.0).sum()
    }

    /// The gradient of the second layer, and the derivatives by the hidden values, of `seed` times
    /// the loss.
    pub(crate) fn output_backward(
        &self,
        layer: Layer<'_>,
        seed: f32,
    ) -> (LayerGradient, Vec<Vec<f32>>) {
        let mut gradient = LayerGradient::zeros(OUTPUTS, HIDDEN);
        let mut upstream = Vec::new();
        for ((item, output), hidden) in self.items.clone().zip(&self.outputs).zip(&self.hidden) {
            let error: Vec<f32> =
                error(item, output).into_iter().map(|error| seed * error).collect();
            gradient.add(&error, hidden);
            upstream.push(layer.pull(&error));
        }
        (gradient, upstream)
    }

    /// The gradient of the first layer.
    pub(crate) fn hidden_backward(&self, upstream: &[Vec<f32>]) -> LayerGradient {
        let mut gradient = LayerGradient::zeros(HIDDEN, INPUTS);
        for ((item, hidden), upstream) in self.items.clone().zip(&self.hidden).zip(upstream) {
            let through_tanh = hidden
                .iter()
                .zip(upstream)
                .map(|(hidden, upstream)| upstream * (1.0 - hidden * hidden));
            gradient.add(&through_tanh.collect::<Vec<_>>(), &input(item));
        }
        gradient
    }
}

fn input(item: usize) -> Vec<f32> {
    (0..INPUTS).map(|index| wave(1000 + item * INPUTS + index)).collect()
}

fn error(item: usize, output: &[f32]) -> Vec<f32> {
    output.iter().enumerate().map(|(index, output)| output - wave(3 * item + index)).collect()
}

/// On whole parameters: the loss of some items, summed, and the gradient of `seed` times that.
pub(crate) fn whole_gradient(parameters: &Named, items: Items, seed: f32) -> (f64, Named) {
    let hidden = Layer::of(parameters, "hidden");
    let output = Layer::of(parameters, "output");
    let mut activations = Activations::hidden(hidden, items);
    let loss = activations.output(output);
    let (of_output, upstream) = activations.output_backward(output, seed);
    let of_hidden = activations.hidden_backward(&upstream);
    let named =
        [("hidden", of_hidden), ("output", of_output)].into_iter().flat_map(|(name, gradient)| {
            [(format!("{name}.weight"), gradient.weight), (format!("{name}.bias"), gradient.bias)]
        });
    (loss, named.collect())
}
