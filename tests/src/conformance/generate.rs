//! `reduce` cases made by chance, with expectations computed here, in f64.

use std::collections::BTreeMap;

use half::{bf16, f16};
use hsdp::{Accumulation, DType, Mesh};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::{CaseParam, ReduceCase};

/// Sizes of dims: one, primes, and both sides of the layout's alignment.
const DIMS: [usize; 12] = [1, 1, 2, 3, 5, 7, 13, 31, 32, 33, 37, 64];

/// No parameter has more elements, so that hundreds of cases run in seconds.
const MOST_ELEMENTS: usize = 1500;

const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

impl ReduceCase {
    /// A case that depends on `seed` alone: any mesh of 1 to 8 ranks, mode, dtypes and divide
    /// factor; parameters of any shape, frozen ones, and ones that are used in some microbatches or
    /// in none.
    #[must_use]
    pub fn generated(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mesh = random_mesh(&mut rng);
        let microbatches = rng.random_range(1..=6);
        let exact = rng.random_bool(0.2) && mesh.world_size().is_power_of_two();
        let mut case = Self {
            name: format!("generated-{seed}-{mesh}"),
            mesh,
            units: (0..rng.random_range(1..=4))
                .map(|_| random_unit(&mut rng, microbatches))
                .collect(),
            microbatches,
            accumulation: *pick(&mut rng, &Accumulation::ALL),
            param_dtype: *pick(&mut rng, &DTYPES),
            // Sums of small integers, divided by powers of two, are exact in f32.
            reduce_dtype: if exact { DType::F32 } else { *pick(&mut rng, &DTYPES) },
            divide_factor: *pick(&mut rng, &[None, None, None, Some(1.0), Some(8.0), Some(0.5)]),
            exact,
            gradients: BTreeMap::new(),
            expected: BTreeMap::new(),
        };
        case.draw_gradients(&mut rng);
        case.compute_expected();
        case
    }

    fn draw_gradients(&mut self, rng: &mut ChaCha8Rng) {
        let parameters: Vec<(String, CaseParam)> =
            self.parameters().map(|(name, param)| (name, param.clone())).collect();
        for (name, param) in parameters {
            let draw = if self.exact { integer } else { *pick(rng, &[small, normal, large]) };
            for microbatch in
                (0..self.microbatches).filter(|microbatch| param.has_gradient(*microbatch))
            {
                for rank in self.mesh.ranks() {
                    let value = |_| carried_by(self.param_dtype, draw(rng));
                    let values = (0..param.shape.iter().product()).map(value).collect();
                    self.gradients.insert(Self::gradient_name(microbatch, rank, &name), values);
                }
            }
        }
    }

    fn compute_expected(&mut self) {
        let trainable = self.parameters().filter(|(_, param)| param.trainable);
        self.expected =
            trainable.map(|(name, param)| (name.clone(), self.sum_of(&name, param))).collect();
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "expectations are f32, rounded once from f64"
    )]
    fn sum_of(&self, name: &str, param: &CaseParam) -> Vec<f32> {
        let mut sums = vec![0.0_f64; param.shape.iter().product()];
        for microbatch in 0..self.microbatches {
            for rank in self.mesh.ranks() {
                let gradient = self.gradients.get(&Self::gradient_name(microbatch, rank, name));
                for (sum, value) in sums.iter_mut().zip(gradient.into_iter().flatten()) {
                    *sum += f64::from(*value);
                }
            }
        }
        sums.iter().map(|sum| (sum / self.divisor()) as f32).collect()
    }
}

fn random_mesh(rng: &mut ChaCha8Rng) -> Mesh {
    let sizes =
        (1..=8).flat_map(|replicate| (1..=8 / replicate).map(move |shard| (replicate, shard)));
    let (replicate, shard) = *pick(rng, &sizes.collect::<Vec<_>>());
    Mesh::new(replicate, shard).expect("both sizes are at least 1")
}

fn random_unit(rng: &mut ChaCha8Rng, microbatches: usize) -> Vec<CaseParam> {
    let count = rng.random_range(1..=4);
    (0..count).map(|index| random_param(rng, index, microbatches)).collect()
}

fn random_param(rng: &mut ChaCha8Rng, index: usize, microbatches: usize) -> CaseParam {
    let dims = rng.random_range(0..=3);
    let mut shape: Vec<usize> = (0..dims).map(|_| *pick(rng, &DIMS)).collect();
    while shape.iter().product::<usize>() > MOST_ELEMENTS {
        shape.pop();
    }
    let some = (0..microbatches).filter(|_| rng.random_bool(0.5)).collect();
    CaseParam {
        name: format!("p{index}"),
        shape,
        trainable: rng.random_bool(0.85),
        used_in: rng.random_bool(0.4).then_some(some),
    }
}

fn pick<'a, T>(rng: &mut ChaCha8Rng, among: &'a [T]) -> &'a T {
    &among[rng.random_range(0..among.len())]
}

/// The nearest number that a gradient in `dtype` can be.
fn carried_by(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

fn integer(rng: &mut ChaCha8Rng) -> f32 {
    f32::from(rng.random_range(-16_i8..=16))
}

fn small(rng: &mut ChaCha8Rng) -> f32 {
    1e-4 * normal(rng)
}

fn large(rng: &mut ChaCha8Rng) -> f32 {
    300.0 * normal(rng)
}

/// Close enough to normal: the sum of some uniform numbers.
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..4).map(|_| rng.random_range(-1.0..=1.0)).sum()
}
