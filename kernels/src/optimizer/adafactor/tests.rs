//! The pieces together are compared with figures of PyTorch and with its formula in f64 on whole
//! parameters; and runs with the whole.

use super::*;
use crate::simd::tests::on_all_widths;

const STEP: AdafactorStep = AdafactorStep {
    learning_rate: 0.05,
    beta2_decay: -0.8,
    epsilon1: f32::EPSILON as f64,
    epsilon2: 1e-3,
    threshold: 1.0,
    weight_decay: 0.1,
    step: 1,
    clip: 1.0,
};

fn wave(len: usize, frequency: f64) -> Vec<f32> {
    (0..len).map(|index| nearest_f32(((index + 1) as f64 * frequency).sin())).collect()
}

/// A stack of matrices and its moments; and the places where it is cut into runs.
#[derive(Debug, Clone, PartialEq)]
struct Stack {
    sizes: [usize; 3],
    cuts: Vec<usize>,
    parameter: Vec<f32>,
    moments: [Vec<f32>; 2],
}

impl Stack {
    fn new([matrices, rows, columns]: [usize; 3], cuts: &[usize]) -> Self {
        let len = matrices * rows * columns;
        let moments = [rows, columns].map(|size| vec![0.0; matrices * size]);
        let cuts = [0].iter().chain(cuts).chain([&len]).copied().collect();
        Self { sizes: [matrices, rows, columns], cuts, parameter: wave(len, 0.3), moments }
    }

    fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        self.cuts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// The sums of squares of rows and columns.
    fn sums(&self, step: &AdafactorStep, gradient: &[f32]) -> [Vec<f64>; 2] {
        let [matrices, rows, columns] = self.sizes;
        let mut sums = [rows, columns].map(|size| vec![0.0; matrices * size]);
        for range in self.runs() {
            let run = MatrixRun { start: range.start, rows, columns };
            let sums = sums.each_mut().map(Vec::as_mut_slice);
            add_squares(run, &gradient[range], step.clip, sums);
        }
        sums
    }

    fn step(&mut self, step: &AdafactorStep, gradient: &[f32]) {
        let [_, rows, columns] = self.sizes;
        let sums = self.sums(step, gradient);
        for ((moments, sums), count) in self.moments.iter_mut().zip(sums).zip([columns, rows]) {
            average_sums(step, moments, &sums, count);
        }
        let runs: Vec<Range<usize>> = self.runs().collect();
        let moments = self.moments.each_ref().map(Vec::as_slice);
        let factored = Factored::new(step, moments, rows, columns);
        let squared_update = runs.iter().map(|range| {
            squared_update(step, &gradient[range.clone()], factored.from(range.start))
        });
        let sums = ParameterSums {
            elements: self.parameter.len(),
            squares: squares(&self.parameter),
            squared_update: squared_update.sum(),
        };
        for range in runs {
            let variance = factored.from(range.start);
            let gradient = &gradient[range.clone()];
            adafactor(step, &sums, &mut self.parameter[range], gradient, variance);
        }
    }
}

fn squares(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum()
}

/// A parameter of one dim, and its second moments.
fn step_vector(step: &AdafactorStep, [parameter, moments]: [&mut [f32]; 2], gradient: &[f32]) {
    average_squares(step, moments, gradient);
    let sums = ParameterSums {
        elements: parameter.len(),
        squares: squares(parameter),
        squared_update: squared_update(step, gradient, step.each(moments)),
    };
    adafactor(step, &sums, parameter, gradient, step.each(moments));
}

fn assert_near(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((f64::from(*found) - expected).abs() < 1e-6, "{found}, not {expected}");
    }
}

/// Figures of `torch.optim.Adafactor(lr=0.05, weight_decay=0.1)`, PyTorch 2.15: element i of a
/// parameter begins as sin(0.3 (i + 1)) in [2, 2, 3], or sin(0.4 (i + 1)) in [4]; its gradient in
/// step t is t sin(0.7 t (i + 1)), or t sin(0.9 t (i + 1)). After three steps.
#[test]
fn the_results_are_those_of_pytorch() {
    let mut stack = Stack::new([2, 2, 3], &[4, 5]);
    let mut vector = wave(4, 0.4);
    let mut moments = vec![0.0; 4];
    for number in 1..=3_u32 {
        let step = AdafactorStep { step: number.into(), ..STEP };
        let times = |frequency: f64, len| -> Vec<f32> {
            let gradient = wave(len, frequency * f64::from(number));
            gradient.iter().map(|value| value * number as f32).collect()
        };
        stack.step(&step, &times(0.7, 12));
        step_vector(&step, [&mut vector, &mut moments], &times(0.9, 4));
    }
    let of_stack = [
        0.175496742,
        0.540914178,
        0.774289429,
        0.879427731,
        1.00389731,
        0.962469101,
        0.871785283,
        0.788675785,
        0.411886007,
        0.0371260904,
        -0.164172769,
        -0.442642242,
    ];
    assert_near(&stack.parameter, &of_stack);
    assert_near(&vector, &[0.277239144, 0.740594864, 0.878118277, 1.02455235]);
}

/// Adafactor in f64 on one whole matrix, by the formulas in the documentation of
/// `torch.optim.Adafactor`.
struct InF64 {
    columns: usize,
    parameter: Vec<f64>,
    row_moments: Vec<f64>,
    column_moments: Vec<f64>,
}

impl InF64 {
    fn step(&mut self, step: &AdafactorStep, gradient: &[f32]) {
        let g: Vec<f64> = gradient.iter().map(|g| f64::from(*g) * f64::from(step.clip)).collect();
        let columns = self.columns;
        let rows = g.len() / self.columns;
        let take = (step.step as f64).powf(step.beta2_decay);
        for row in 0..rows {
            let mean =
                (0..columns).map(|at| g[row * columns + at].powi(2)).sum::<f64>() / columns as f64;
            self.row_moments[row] += take * (mean - self.row_moments[row]);
        }
        for column in 0..columns {
            let mean =
                (0..rows).map(|at| g[at * columns + column].powi(2)).sum::<f64>() / rows as f64;
            self.column_moments[column] += take * (mean - self.column_moments[column]);
        }
        let mean = self.row_moments.iter().sum::<f64>() / rows as f64;
        let update = |at: usize| {
            let product = self.row_moments[at / columns] * self.column_moments[at % columns];
            g[at] / (product / mean.max(step.epsilon1)).sqrt().max(step.epsilon1)
        };
        let update: Vec<f64> = (0..g.len()).map(update).collect();
        let root_mean =
            |all: &[f64]| (all.iter().map(|x| x * x).sum::<f64>() / all.len() as f64).sqrt();
        let rho = step.learning_rate.min(1.0 / (step.step as f64).sqrt());
        let alpha = step.epsilon2.max(root_mean(&self.parameter)) * rho;
        let scale = (root_mean(&update) / step.threshold).max(1.0);
        for (p, u) in self.parameter.iter_mut().zip(update) {
            *p = *p * (1.0 - step.learning_rate * step.weight_decay) - alpha * u / scale;
        }
    }
}

#[test]
fn runs_follow_the_definition_for_many_steps_wherever_they_are_cut() {
    let rows = 9;
    let columns = 611;
    for cuts in [&[][..], &[1, 2, 610, 611, 612, 2000], &[300, 301, 4888, 5498]] {
        let mut stack = Stack::new([1, rows, columns], cuts);
        let parameter = stack.parameter.iter().copied().map(f64::from).collect();
        let row_moments = vec![0.0; rows];
        let column_moments = vec![0.0; columns];
        let mut reference = InF64 { columns, parameter, row_moments, column_moments };
        for number in 1..=20 {
            let step = AdafactorStep { step: number, clip: 0.3, ..STEP };
            let gradient = wave(rows * columns, number as f64 * 0.7);
            stack.step(&step, &gradient);
            reference.step(&step, &gradient);
        }
        assert_near(&stack.parameter, &reference.parameter);
        assert_near(&stack.moments[0], &reference.row_moments);
        assert_near(&stack.moments[1], &reference.column_moments);
    }
}

#[test]
fn runs_give_the_sums_of_the_whole_and_the_bits_of_its_elements_on_every_machine() {
    let sizes = [3, 4, 300];
    let gradient = wave(3600, 0.7);
    let whole = Stack::new(sizes, &[]);
    let cut = Stack::new(sizes, &[7, 299, 300, 301, 1199, 1200, 1500, 2399, 2750]);
    for (whole, cut) in whole.sums(&STEP, &gradient).iter().zip(cut.sums(&STEP, &gradient)) {
        for (whole, cut) in whole.iter().zip(cut) {
            assert!((whole - cut).abs() <= 1e-14 * whole, "{whole}, and {cut} of runs");
        }
    }
    let moments = [wave(12, 0.11), wave(900, 0.13)].map(|it| it.iter().map(|x| x * x).collect());
    let moments: [Vec<f32>; 2] = moments;
    let sums = ParameterSums { elements: 3600, squares: 7.0, squared_update: 9000.0 };
    let factored = Factored::new(&STEP, [&moments[0], &moments[1]], 4, 300);
    let updated = |stack: &Stack| {
        let mut parameter = stack.parameter.clone();
        for range in stack.runs() {
            let variance = factored.from(range.start);
            let gradient = &gradient[range.clone()];
            adafactor(&STEP, &sums, &mut parameter[range], gradient, variance);
        }
        parameter
    };
    assert_eq!(on_all_widths(|| updated(&cut)), updated(&whole));
}

/// sqrt(epsilon1^2) divides a gradient whose moments are 0, and the update is scaled down to a root
/// mean square of 1.
#[test]
fn moments_of_zero_are_no_divisor() {
    let step = AdafactorStep { weight_decay: 0.0, ..STEP };
    let factored = Factored::new(&step, [&[0.0; 2], &[0.0; 2]], 2, 2);
    let squared_update = squared_update(&step, &[1e-3; 4], factored.from(0));
    let expected = 4.0 * (1e-3 / f64::from(f32::EPSILON)).powi(2);
    assert!((squared_update / expected - 1.0).abs() < 1e-6, "{squared_update}");
    let mut parameter = [1.0; 4];
    let sums = ParameterSums { elements: 4, squares: 4.0, squared_update };
    adafactor(&step, &sums, &mut parameter, &[1e-3; 4], factored.from(0));
    assert_near(&parameter, &[0.95; 4]);
}

#[test]
#[should_panic(expected = "moments of other matrices")]
fn moments_are_those_of_whole_matrices() {
    let _ = Factored::new(&STEP, [&[0.0; 4], &[0.0; 3]], 2, 3);
}
