//! Products and extremes against central differences: of the sum over ranks of `<C(x)_r, g_r>`, in
//! f64.

use hsdp::World;
use hsdp::collective::{Collective, Reducer};
use hsdp_comm::{Channel, Tag};
use hsdp_tests::support::worlds::on_ranks;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::reductions;

/// By how much an element is moved to either side.
const STEP: f64 = 1.0 / 32.0;

/// Both are linear in one element while no tie is crossed, so a central difference is off by
/// roundings alone: those of a sum of some products, divided by two steps.
const BOUND: f64 = 1e-11;

const PARTS: usize = 2;

#[test]
fn products_and_extremes_follow_their_differences() {
    for size in 1..=5 {
        for reducer in [Reducer::Product, Reducer::Min, Reducer::Max] {
            for collective in reductions(reducer) {
                check(size, &collective);
            }
        }
    }
}

fn check(size: usize, collective: &Collective) {
    let inputs = apart(size, PARTS * size);
    let ranks = on_ranks(size, |world| {
        let (loss, gradient) = differentiated(&world, collective, &inputs)?;
        assert!(loss.is_finite());
        let mut of_differences = Vec::new();
        for rank in 0..size {
            for element in 0..PARTS * size {
                let at = |by: f64| {
                    let mut moved = inputs.clone();
                    moved[rank][element] += by;
                    Ok::<f64, hsdp::Error>(differentiated(&world, collective, &moved)?.0)
                };
                of_differences.push([at(STEP)?, at(-STEP)?]);
            }
        }
        Ok((gradient, of_differences))
    });
    let gradients: Vec<f64> = ranks.iter().flat_map(|(gradient, _)| gradient.clone()).collect();
    for (place, gradient) in gradients.iter().enumerate() {
        let loss = |side: usize| ranks.iter().map(|(_, losses)| losses[place][side]).sum::<f64>();
        let difference = (loss(0) - loss(1)) / (2.0 * STEP);
        let error = (gradient - difference).abs();
        let said = format!("{collective:?} of {size}, element {place}: {gradient}, {difference}");
        assert!(error <= BOUND * (1.0 + gradient.abs()), "{said}");
    }
    assert!(gradients.iter().any(|gradient| *gradient != 0.0));
}

/// This rank's `<C(x), g>`, and the gradient of the sum of them.
fn differentiated(
    world: &World,
    collective: &Collective,
    inputs: &[Vec<f64>],
) -> Result<(f64, Vec<f64>), hsdp::Error> {
    let rank = world.rank().index();
    let group = world.world_group(Channel::User);
    let (output, backward) = collective.forward(&group, Tag::default(), inputs[rank].clone())?;
    let weights = |output: &Vec<f64>| -> Vec<f64> {
        (0..output.len()).map(|element| (3 * rank + 2 * element) as f64 - 3.5).collect()
    };
    let cotangent = output.as_ref().map(weights);
    let terms = output.iter().flatten().zip(cotangent.iter().flatten());
    let loss = terms.map(|(y, g)| y * g).sum();
    Ok((loss, backward.gradient(cotangent)?))
}

/// Returns inputs whose elements differ between any two ranks by several steps: signs are mixed,
/// and sizes around 1.
fn apart(size: usize, len: usize) -> Vec<Vec<f64>> {
    let mut rng = ChaCha8Rng::seed_from_u64(size as u64);
    let mut inputs = vec![vec![0.0; len]; size];
    for element in 0..len {
        let mut levels: Vec<usize> = (0..size).collect();
        levels.shuffle(&mut rng);
        for (input, level) in inputs.iter_mut().zip(levels) {
            let sign = if rng.random_bool(0.5) { 1.0 } else { -1.0 };
            input[element] = sign * (0.5 + 0.25 * level as f64 + rng.random_range(0.0..0.1));
        }
    }
    inputs
}
