//! Groups of parameters: each parameter is updated as by an optimizer whose only options are those
//! of its group.

use hsdp::{
    AdamW, AdamWOptions, Error, Mesh, ModelOptions, MomentumKind, Optimizer, Param, Sgd,
    SgdOptions, ShardedModel, StepOptions, World,
};
use hsdp_tests::support::models::partly_frozen;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, common_error, mesh, meshes, on_ranks, outcomes};

use crate::updates::{Parameters, gradients, model, parameters};

const MESHES: [(usize, usize); 5] = [(1, 1), (1, 3), (2, 2), (1, 8), (3, 1)];

const BASE: AdamWOptions =
    AdamWOptions { learning_rate: 0.02, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.0 };
const SGD: SgdOptions = SgdOptions {
    learning_rate: 0.02,
    momentum: 0.5,
    momentum_kind: MomentumKind::Classic,
    weight_decay: 0.0,
};

fn is_weight(param: &Param) -> bool {
    param.shape.len() >= 2
}

fn is_third(param: &Param) -> bool {
    param.name.starts_with("third")
}

fn decayed(options: AdamWOptions) -> AdamWOptions {
    AdamWOptions { weight_decay: 0.1, ..options }
}

fn slow(options: AdamWOptions) -> AdamWOptions {
    AdamWOptions {
        learning_rate: options.learning_rate / 4.0,
        betas: (0.5, 0.75),
        eps: 1e-3,
        ..options
    }
}

/// The parameters after three steps of an optimizer whose rate is 0.02 at first.
fn trained<O: Optimizer>(mesh: Mesh, made: impl Fn(&ShardedModel) -> O + Sync) -> Parameters {
    trained_from(0.02, mesh, made)
}

fn trained_from<O: Optimizer>(
    rate: f64,
    mesh: Mesh,
    made: impl Fn(&ShardedModel) -> O + Sync,
) -> Parameters {
    common(on_ranks(mesh.world_size(), |world| {
        let options = ModelOptions::on(mesh);
        let mut model = springs::model_of(world, &partly_frozen(), &options)?;
        let mut optimizer = made(&model);
        for step in 0..3_u8 {
            optimizer.set_learning_rate(rate / f64::from(step + 1));
            let mut opened = model.begin_step(StepOptions::microbatches(1))?;
            let slope = f32::from(step) - 0.75;
            slopes::microbatch_by(&mut opened, &|param| {
                Some(if is_weight(param) { slope } else { -2.0 * slope })
            })?;
            let gradients = opened.finish()?;
            optimizer.step(&mut model, gradients)?;
        }
        model.full_parameters()
    }))
}

#[track_caller]
fn compare(grouped: &Parameters, name: &str, of: &Parameters) {
    let bits = |all: &Parameters| all[name].iter().map(|it| it.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(grouped), bits(of), "{name}");
}

#[test]
fn each_group_of_adamw_is_updated_as_by_an_optimizer_of_its_options_on_every_mesh() {
    let alone = |options: AdamWOptions| {
        trained_from(options.learning_rate, Mesh::SINGLE, move |model| AdamW::new(model, options))
    };
    let [plain, with_decay, slower] = [BASE, decayed(BASE), slow(BASE)].map(alone);
    assert!(plain["first.weight"] != with_decay["first.weight"]);
    for mesh in meshes(MESHES) {
        let grouped = trained(mesh, |model| {
            AdamW::new(model, BASE).group(is_weight, decayed).group(is_third, slow)
        });
        compare(&grouped, "first.weight", &with_decay);
        compare(&grouped, "first.bias", &plain);
        compare(&grouped, "third.bias", &slower);
        compare(&grouped, "third.weight", &plain); // frozen
    }
}

#[test]
fn each_group_of_sgd_is_updated_as_by_an_optimizer_of_its_options_on_every_mesh() {
    let still = |options| SgdOptions { momentum: 0.0, weight_decay: 0.1, ..options };
    let alone = |options| trained(Mesh::SINGLE, move |model| Sgd::new(model, options));
    let [plain, without] = [SGD, still(SGD)].map(alone);
    for mesh in meshes(MESHES) {
        let grouped = trained(mesh, |model| Sgd::new(model, SGD).group(is_weight, still));
        compare(&grouped, "first.weight", &without);
        compare(&grouped, "first.bias", &plain);
    }
}

#[test]
fn the_first_group_that_has_a_parameter_counts() {
    let first = trained(mesh(1, 2), |model| AdamW::new(model, BASE).group(is_weight, decayed));
    let twice = trained(mesh(1, 2), |model| {
        AdamW::new(model, BASE).group(is_weight, decayed).group(is_weight, slow)
    });
    assert_eq!(first, twice);
}

/// A model that one step has updated, by an optimizer whose group changes its rate or does not.
fn after_a_step(
    base: f64,
    of_group: fn(AdamWOptions) -> AdamWOptions,
) -> Result<Parameters, Error> {
    let mut model = model();
    let options = AdamWOptions { learning_rate: base, ..BASE };
    let mut adamw = AdamW::new(&model, options).group(is_weight, of_group);
    adamw.set_learning_rate(0.0);
    adamw.set_learning_rate(0.5);
    let gradients = gradients(&mut model);
    adamw.step(&mut model, gradients)?;
    Ok(parameters(&model))
}

#[test]
fn a_group_keeps_the_ratio_of_its_rate_also_over_a_rate_of_0() {
    let quarter = after_a_step(0.02, |it| AdamWOptions { learning_rate: 0.005, ..it });
    let before = parameters(&model());
    let quarter = quarter.expect("an update");
    for (name, rate) in [("first.weight", 0.125), ("first.bias", 0.5)] {
        for (before, after) in before[name].iter().zip(&quarter[name]) {
            assert!((before - after - rate).abs() < 1e-5, "{name}: {before} to {after}");
        }
    }
}

/// The ratio to a rate of 0 does not exist, and that of a rate that is not changed is 1.
#[test]
fn a_group_of_an_optimizer_of_rate_0_may_change_all_options_but_the_rate() {
    let decay = after_a_step(0.0, decayed).expect("an update");
    assert_eq!(decay, after_a_step(0.02, decayed).expect("an update"));
    let refused = after_a_step(0.0, slow).expect_err("there is no ratio").to_string();
    let expected =
        "adamw group 0 changes the learning rate, which was 0: there is no ratio to keep";
    assert!(refused.contains(expected), "{refused}");
}

#[test]
fn momentum_of_a_group_alone_is_refused() {
    let mut model = model();
    let plain = SgdOptions { momentum: 0.0, ..SGD };
    let mut sgd = Sgd::new(&model, plain).group(is_weight, |_| SGD);
    let gradients = gradients(&mut model);
    let refused = sgd.step(&mut model, gradients).expect_err("it has no velocities").to_string();
    assert!(
        refused
            .contains("sgd group 0 needs state, and the options of the optimizer itself keep none"),
        "{refused}"
    );
}

/// The error of all ranks, of which rank 2 makes another optimizer.
fn told(made: fn(&ShardedModel, usize) -> AdamW) -> String {
    let run = |world: World| {
        let rank = world.rank().index();
        let options = ModelOptions::on(mesh(2, 2));
        let mut model = springs::model_of(world, &partly_frozen(), &options)?;
        let mut adamw = made(&model, rank);
        let gradients = gradients(&mut model);
        adamw.step(&mut model, gradients)?;
        model.begin_step(StepOptions::microbatches(1)).map(drop)
    };
    common_error(outcomes(4, run)).to_string()
}

#[test]
fn ranks_compare_the_options_and_the_parameters_of_groups() {
    let rate = told(|model, rank| {
        let decay = if rank == 2 { 0.3 } else { 0.1 };
        AdamW::new(model, BASE)
            .group(is_weight, move |it| AdamWOptions { weight_decay: decay, ..it })
    });
    let expected =
        "rank 2 has adamw group 0 weight_decay 0.3, rank 0 has adamw group 0 weight_decay 0.1";
    assert!(rate.contains(expected), "{rate}");
    let members = told(|model, rank| {
        AdamW::new(model, BASE).group(if rank == 2 { is_third } else { is_weight }, decayed)
    });
    assert!(members.contains("rank 2 has adamw group 0: 1 parameters, names 0x"), "{members}");
}

/// Three steps, whose rates `set` sets before each.
fn scheduled(
    mut adamw: impl FnMut(&ShardedModel) -> AdamW,
    set: impl Fn(&mut AdamW, f64),
) -> Parameters {
    let mut model = model();
    let mut adamw = adamw(&model);
    for rate in [0.03, 0.02, 0.05] {
        set(&mut adamw, rate);
        let gradients = gradients(&mut model);
        adamw.step(&mut model, gradients).expect("an update");
    }
    parameters(&model)
}

#[test]
fn a_group_may_have_a_schedule_of_its_own() {
    let own = |rate: f64| 0.1 - rate;
    let grouped = scheduled(
        |model| AdamW::new(model, BASE).group(is_third, |it| it).group(is_weight, |it| it),
        |adamw, rate| {
            adamw.set_learning_rate_of(1, own(rate));
            adamw.set_learning_rate(rate);
        },
    );
    let plain = |model: &ShardedModel| AdamW::new(model, BASE);
    let followed = scheduled(plain, |adamw, rate| adamw.set_learning_rate(rate));
    let set = scheduled(plain, |adamw, rate| adamw.set_learning_rate(own(rate)));
    assert_ne!(followed, set);
    for (name, values) in &grouped {
        let has_own = name.ends_with("weight") && !name.starts_with("third");
        let expected = if has_own { &set[name] } else { &followed[name] };
        assert_eq!(values, expected, "{name}");
    }
}
