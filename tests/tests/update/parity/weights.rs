//! The weighted mean: uneven weights, and items that are grouped in another way.

use hsdp::{
    Accumulation, Error, LossSum, Mesh, ModelOptions, Objective, Optimizer, Param, Sgd, SgdOptions,
    ShardedModel, StepOptions, UnitGradients, World,
};
use hsdp_tests::support::handmade::in_f32;
use hsdp_tests::support::models::{one_parameter, unit};
use hsdp_tests::support::worlds::{common, mesh, on_ranks};
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::parity::meshes;

/// The gradients of the items of a step, by microbatch and rank; each item's is a list of small
/// integers.
type Grouping = Vec<Vec<Vec<Vec<f32>>>>;

/// How a rank words the loss of its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wording {
    Sum,
    Mean,
}

/// Results of a step: the gradient, and the parameter after an update.
#[derive(Clone, Debug, PartialEq)]
struct Updated {
    gradient: Vec<f32>,
    parameter: Vec<f32>,
}

fn updated(
    mesh: Mesh,
    accumulation: Accumulation,
    wording: Wording,
    grouping: &Grouping,
) -> Updated {
    let options =
        ModelOptions { accumulation, objective: Objective::WeightedMean, ..ModelOptions::on(mesh) };
    common(on_ranks(mesh.world_size(), |world| one_step(world, options.clone(), wording, grouping)))
}

fn one_step(
    world: World,
    options: ModelOptions,
    wording: Wording,
    grouping: &Grouping,
) -> Result<Updated, Error> {
    let rank = world.rank().index();
    let elements =
        grouping.iter().flatten().flatten().map(Vec::len).next().expect("there are items");
    let mut model = ShardedModel::new(world, one_parameter(elements), options, |param: &Param| {
        vec![1.0; param.numel()]
    })?;
    let momentum = SgdOptions { learning_rate: 0.1, momentum: 0.9, ..SgdOptions::default() };
    let mut optimizer = Sgd::new(&model, momentum);
    let mut step = model.begin_step(StepOptions::microbatches(grouping.len()))?;
    for of_ranks in grouping {
        let items = &of_ranks[rank];
        let weight = items.len() as u64;
        let mut pass = step.microbatch()?;
        let loss = match wording {
            Wording::Sum => LossSum::new(0.0, weight),
            // The mean of nothing is NaN in every framework.
            Wording::Mean if weight == 0 => LossSum::from_mean(f64::NAN, 0),
            Wording::Mean => LossSum::from_mean(0.0, weight),
        };
        let seed = in_f32(pass.loss(loss)?.value());
        let gradient = (weight > 0).then(|| gradient_of(items, wording, seed));
        let gradients = UnitGradients::new();
        let gradients = match gradient {
            Some(gradient) => gradients.with(gradient),
            None => gradients.without(),
        };
        pass.reduce(unit(0), gradients)?;
        pass.finish()?;
    }
    let gradients = step.finish()?;
    let gradient = gradients.full(&model)?.remove("w").expect("the model has one parameter");
    optimizer.step(&mut model, gradients)?;
    let parameter = model.full_parameters()?.remove("w").expect("the model has one parameter");
    Ok(Updated { gradient, parameter })
}

/// The gradient of `seed` times the sum, or the mean, of the items' losses.
fn gradient_of(items: &[Vec<f32>], wording: Wording, seed: f32) -> Vec<f32> {
    let count = match wording {
        Wording::Sum => 1.0,
        Wording::Mean => f32::from(u16::try_from(items.len()).expect("few items")),
    };
    let element = |index: usize| items.iter().map(|item| item[index]).sum::<f32>() / count * seed;
    (0..items[0].len()).map(element).collect()
}

/// The table of what averaging averages gets wrong. Items have the gradients 1, 2, 3, ... in the
/// order of rank 0's first and second microbatch, then rank 1's; sizes are in that order too.
#[test]
fn uneven_weights_give_the_unsharded_mean() {
    let table = [
        ([2, 2, 2, 2], 9.0 / 2.0),
        ([3, 3, 1, 1], 9.0 / 2.0),
        ([3, 1, 3, 1], 9.0 / 2.0),
        ([3, 1, 1, 2], 4.0),
        ([2, 2, 2, 0], 7.0 / 2.0),
    ];
    for (sizes, mean) in table {
        let grouping = in_table_order(sizes);
        for mesh in [mesh(1, 2), mesh(2, 1)] {
            for accumulation in Accumulation::ALL {
                for wording in [Wording::Sum, Wording::Mean] {
                    let updated = updated(mesh, accumulation, wording, &grouping);
                    assert_eq!(
                        updated.gradient,
                        [mean],
                        "{sizes:?} on {mesh}, {accumulation}, {wording:?}"
                    );
                }
            }
        }
    }
}

fn in_table_order(sizes: [usize; 4]) -> Grouping {
    let mut next = 0.0;
    let mut grouping: Grouping = vec![vec![Vec::new(); 2]; 2];
    for (place, size) in sizes.into_iter().enumerate() {
        for _ in 0..size {
            next += 1.0;
            grouping[place % 2][place / 2].push(vec![next]);
        }
    }
    grouping
}

/// The same items, dealt out to other ranks in other microbatches, some of which get none: the same
/// bits. Integers add exactly in any order, so every difference would be a wrong weight.
#[test]
fn grouping_the_items_in_another_way_leaves_the_update_as_it_was() {
    const ELEMENTS: usize = 67;
    let mut rng = ChaCha8Rng::seed_from_u64(58005);
    let mut integer = || f32::from(rng.random_range(-8_i8..=8));
    let mut items: Vec<Vec<f32>> =
        (0..23).map(|_| (0..ELEMENTS).map(|_| integer()).collect()).collect();
    let alone =
        updated(mesh(1, 1), Accumulation::ReduceScatter, Wording::Sum, &vec![vec![items.clone()]]);
    for mesh in meshes() {
        for accumulation in Accumulation::ALL {
            for microbatches in [1, 2, 5] {
                items.shuffle(&mut rng);
                let mut grouping: Grouping =
                    vec![vec![Vec::new(); mesh.world_size()]; microbatches];
                for item in &items {
                    let microbatch = rng.random_range(0..microbatches);
                    let rank = rng.random_range(0..mesh.world_size());
                    grouping[microbatch][rank].push(item.clone());
                }
                let regrouped = updated(mesh, accumulation, Wording::Sum, &grouping);
                assert_eq!(regrouped, alone, "{mesh}, {accumulation}, {microbatches} microbatches");
            }
        }
    }
}
