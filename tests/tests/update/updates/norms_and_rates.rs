//! Learning rates and losses of steps.

use hsdp::{
    LearningRate, LossSum, ModelOptions, Objective, Optimizer, Sgd, SgdOptions, StepOptions, Unused,
};
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{common, mesh, on_ranks};

#[test]
fn each_step_uses_the_learning_rate_of_its_schedule() {
    let schedule = LearningRate::warmup_cosine(0.5, 0.125, 2, 6);
    let rates: Vec<f64> = (0..8).map(|step| schedule.at(step)).collect();
    assert_eq!((rates[0], rates[1], rates[6], rates[7]), (0.25, 0.5, 0.125, 0.125));
    let values = common(on_ranks(4, |world| {
        let mut model = springs::model(world, &ModelOptions::on(mesh(2, 2)))?;
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let mut values = vec![model.full_parameters()?["third.bias"][7]];
        for rate in &rates {
            sgd.set_learning_rate(*rate);
            let gradients = slopes::gradients(&mut model, 1.0)?;
            sgd.step(&mut model, gradients)?;
            values.push(model.full_parameters()?["third.bias"][7]);
        }
        Ok(values)
    }));
    for (pair, rate) in values.windows(2).zip(&rates) {
        assert!((f64::from(pair[0] - pair[1]) - rate).abs() < 1e-6, "{pair:?}, rate {rate}");
    }
}

#[test]
fn the_loss_of_a_step_is_that_of_its_objective() {
    let loss = |objective, weights: [u64; 4]| {
        let unused = Unused::Zeros;
        let options = ModelOptions { objective, unused, ..ModelOptions::on(mesh(2, 2)) };
        common(on_ranks(4, |world| {
            let rank = world.rank().index();
            let mut model = springs::model(world, &options)?;
            let mut step = model.begin_step(StepOptions::microbatches(1))?;
            let mut pass = step.microbatch()?;
            let _ = pass.loss(LossSum::from_mean(
                f64::from(u8::try_from(rank).expect("small")),
                weights[rank],
            ))?;
            pass.finish()?;
            let gradients = step.finish()?;
            Ok((gradients.loss(), gradients.weight()))
        }))
    };
    assert_eq!(loss(Objective::WeightedMean, [1, 1, 1, 5]), (18.0 / 8.0, 8));
    assert_eq!(loss(Objective::RankMean, [1, 1, 1, 5]), (6.0 / 4.0, 8));
    assert_eq!(loss(Objective::WeightedMean, [0, 4, 0, 0]), (1.0, 4));
    assert_eq!(loss(Objective::Sum, [1, 1, 1, 5]), (18.0, 8));
    assert_eq!(loss(Objective::Factor(4.0), [1, 1, 1, 5]), (4.5, 8));
    assert_eq!(loss(Objective::Sum, [0, 0, 0, 0]), (0.0, 0));
}
