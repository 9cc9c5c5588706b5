//! The updates that are refused. A refused update changes no parameter and no state of its
//! optimizer.

use hsdp::{AdamW, AdamWOptions, Optimizer, Sgd, SgdOptions, ShardedModel};

use crate::updates::{gradients, model, parameters};

#[test]
fn gradients_of_an_older_step_are_refused_and_age_nothing() {
    for make in [adamw, sgd] {
        let trained = |stale: bool| {
            let mut model = model();
            let mut optimizer = make(&model);
            let older = gradients(&mut model);
            let newer = gradients(&mut model);
            if stale {
                let refused = optimizer.step(&mut model, older).expect_err("it is stale");
                assert_eq!(
                    refused.to_string(),
                    "optimizer step on rank 0, step 0: the gradients are those of step 0, the model has finished 2 steps"
                );
            }
            optimizer.step(&mut model, newer).expect("an update");
            parameters(&model)
        };
        assert_eq!(trained(true), trained(false));
    }
}

#[test]
fn gradients_of_another_model_are_refused() {
    for make in [adamw, sgd] {
        let mut one = model();
        let mut other = model();
        let mut optimizer = make(&one);
        let _ = gradients(&mut one);
        let foreign = gradients(&mut other);
        let before = parameters(&one);
        let refused = optimizer.step(&mut one, foreign).expect_err("it is another's").to_string();
        assert!(refused.ends_with("these are the gradients of another model"), "{refused}");
        assert_eq!(parameters(&one), before);
    }
}

#[test]
fn gradients_that_are_clipped_twice_are_clipped_to_the_least_norm() {
    let factor = |norms: &[f64]| {
        let clipped = norms.iter().fold(gradients(&mut model()), |it, norm| it.clip(*norm));
        clipped.clip_factor()
    };
    let least = factor(&[1e-3]);
    assert!(least < 1.0);
    assert_eq!([factor(&[1e-3, 1e9]), factor(&[1e9, 1e-3])], [least, least]);
}

fn adamw(model: &ShardedModel) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(model, AdamWOptions::default()))
}

fn sgd(model: &ShardedModel) -> Box<dyn Optimizer> {
    Box::new(Sgd::new(model, SgdOptions::default()))
}
