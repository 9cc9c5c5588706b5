//! Evaluations of models in candle: the losses of the unsharded model, one gather of each unit, and no graph.

mod common;

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use hsdp::{Error as RuntimeError, Mesh, ModelOptions, ShardedModel, World};
use hsdp_candle::gpt::{self, Gpt, GptConfig};
use hsdp_candle::{Error, Pass, Plain, Units};

use common::{input, layer, layers, loss_of_layers, sharded, step, words};

/// Rank r has r batches, and rank 0 has none. The GPT's `root` is kept, because it is used at both ends.
#[test]
fn the_mean_loss_is_that_of_the_unsharded_model() {
    let gpt = gpt();
    let spec = gpt.config().spec();
    let values = spec.params().map(|(_, param)| (param.name.clone(), gpt::init(param, 1)));
    let plain = Plain::new(spec.clone(), &values.collect::<BTreeMap<_, _>>(), Default::default());
    let plain = plain.expect("values for all");
    let batches: Vec<usize> =
        (0..4).flat_map(|rank| (0..rank).map(move |at| rank * 8 + at)).collect();
    let losses = batches.iter().map(|batch| loss(&gpt, &plain, *batch).expect("a loss"));
    let expected = losses.sum::<f64>() / batches.len() as f64;

    let means = hsdp::world(4, |world| -> Result<f64, Error> {
        let rank = world.rank().index();
        let options = ModelOptions::on(Mesh::new(2, 2).expect("four ranks"));
        let mut model =
            ShardedModel::new(world, spec.clone(), options, |param| gpt::init(param, 1))?;
        let mut evaluation = model.evaluation()?;
        let mut sum = 0.0;
        for at in 0..rank {
            let pass = Pass::new(evaluation.batch()?)?;
            sum += loss(&gpt, &pass, rank * 8 + at)?;
            pass.finish()?;
        }
        Ok(evaluation.mean(sum, rank as u64)?)
    });
    for mean in means {
        let mean = mean.expect("a mean");
        assert!((mean - expected).abs() <= 1e-6 * expected, "{mean}, unsharded {expected}");
    }
}

#[test]
fn units_are_gathered_once_and_nothing_has_a_history() {
    let events = hsdp::world(2, |world| -> Result<_, Error> {
        let mut model = sharded(world, layers(3, 4), mesh());
        model.record_events();
        let mut evaluation = model.evaluation()?;
        let pass = Pass::new(evaluation.batch()?)?;
        let output = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        assert!(!output.track_op());
        let output = Units::recomputed(
            &pass,
            "layer.1",
            &output,
            std::sync::Arc::new(|p, x| layer(p, 1, x)),
        )?;
        assert!(!output.track_op());
        pass.unit("layer.2", &output, |p, x| layer(p, 2, x))?;
        pass.finish()?;
        evaluation.mean(0.0, 1)?;
        drop(evaluation);
        Ok(model.take_events())
    });
    for events in events {
        let words = words(&events.expect("an evaluation"));
        assert_eq!(words, ["gather 0 forward", "gather 1 forward", "gather 2 forward"]);
    }
}

#[test]
fn an_evaluation_has_no_backward() {
    let mut model = sharded(World::single(), layers(1, 4), Mesh::new(1, 1).expect("one rank"));
    let mut evaluation = model.evaluation().expect("between steps");
    let pass = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
    let loss = loss_of_layers(&pass, 1, &input(0, 3, 4)).expect("a forward");
    let error = pass.backward(&loss, 1).expect_err("there is none");
    assert!(matches!(error, Error::Runtime(RuntimeError::Misuse { .. })), "{error}");
    drop(evaluation);
    let _ = step(&mut model, |pass| loss_of_layers(pass, 1, &input(0, 3, 4))).expect("a step");
}

fn gpt() -> Gpt {
    Gpt::new(GptConfig { vocab: 11, context: 6, width: 8, heads: 2, layers: 2 }).expect("sizes")
}

fn mesh() -> Mesh {
    Mesh::new(1, 2).expect("two shards")
}

/// The mean loss of a batch of two sequences.
fn loss(gpt: &Gpt, units: &dyn Units, batch: usize) -> candle_core::Result<f64> {
    let token = |at: usize| u32::try_from((batch * 7 + at * 3) % 11).expect("below 11");
    let tokens = |from: usize| {
        let tokens: Vec<u32> = (from..from + 12).map(token).collect();
        Tensor::from_vec(tokens, (2, 6), &Device::Cpu)
    };
    let loss = gpt.loss(units, &tokens(0)?, &tokens(1)?)?;
    Ok(f64::from(loss.to_scalar::<f32>()?))
}
