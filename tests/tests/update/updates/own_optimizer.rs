//! An optimizer of a user's own: a rule, or `ShardedModel::update`, one run of elements after the
//! other.

use hsdp::{
    Grouped, Mesh, ModelOptions, ModelSpec, Optimizer, Param, Run, StepOptions, Unit, UnitId,
    Update, World,
};
use hsdp_tests::support::rules::Signs;
use hsdp_tests::support::slopes;
use hsdp_tests::support::springs;

use crate::updates::{gradients, model, parameters};

#[test]
fn an_optimizer_can_be_written_outside() {
    let mut model = model();
    let mut signs = Grouped::<Signs>::new(&model, Signs { rate: 0.0, mark: 0.0 });
    signs.set_learning_rate(0.25);
    let before = parameters(&model);
    let gradients = gradients(&mut model);
    assert_eq!(signs.step(&mut model, gradients).expect("an update"), Update::Applied);
    for (name, after) in parameters(&model) {
        for (before, after) in before[&name].iter().zip(after) {
            assert_eq!(before - 0.25, after, "{name}");
        }
    }
}

/// A parameter may be larger than a run, the part that is divided and updated at a time.
#[test]
fn runs_cover_a_large_parameter_once_with_the_gradient_that_is_told() {
    const LEN: usize = 3 * 4096 + 1001;
    let unit = Unit::new("unit").param(Param::new("small", [3])).param(Param::new("large", [LEN]));
    let options = ModelOptions::on(Mesh::SINGLE);
    let spec = ModelSpec::new().unit(unit);
    let mut model = springs::model_of(World::single(), &spec, &options).expect("a model");
    let mut step = model.begin_step(StepOptions::microbatches(3)).expect("a step");
    for slope in [1.0, 2.0, 5.0] {
        slopes::microbatch(&mut step, slope).expect("a microbatch");
    }
    let gradients = step.finish().expect("gradients");
    let told = gradients.shard(&model, UnitId::new(0)).expect("it lies on the host");
    let mut updated = [vec![0; 3], vec![0; LEN]];
    let update = model.update(gradients, |run| {
        let Run { piece, parameters, gradient, .. } = run;
        assert!(gradient.iter().eq(told[piece.shard_range()].iter().copied()));
        assert!(gradient.iter().len() == piece.len && parameters.len() == piece.len);
        assert!(gradient.iter().all(|element| element == 8.0 / 3.0), "a mean, which was divided");
        updated[piece.param][piece.param_range()].iter_mut().for_each(|times| *times += 1);
    });
    assert_eq!(update.expect("an update"), Update::Applied);
    assert!(updated.into_iter().flatten().all(|times| times == 1));
}
