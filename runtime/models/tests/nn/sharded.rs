//! A GPT on sharded parameters: gradients and losses of the unsharded model.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use hsdp::{Mesh, ModelOptions, ShardedModel, WorldOptions};
use hsdp_candle::{Error, Pass, Plain, Units};
use hsdp_models::gpt::{self, Gpt, GptConfig};

use crate::common::{assert_same_bits, mean, plain_gradients, sharded, step};

const TINY: GptConfig = GptConfig { vocab: 11, context: 6, width: 8, heads: 2, layers: 2 };

#[test]
fn gradients_are_those_of_the_unsharded_model_bit_by_bit() {
    let mesh = Mesh::new(2, 2).expect("four ranks");
    let loss = |units: &dyn Units, rank: usize| {
        let shift = u32::try_from(rank).expect("four ranks");
        let tokens: Vec<u32> = (0..12).map(|i| (i * 5 + shift) % 11).collect();
        let tokens = Tensor::from_vec(tokens, (2, 6), &Device::Cpu)?;
        gpt().loss(units, &tokens, &tokens.flip(&[1])?)
    };
    let parts: Vec<_> =
        (0..4).map(|rank| plain_gradients(&TINY.spec(), |plain| loss(plain, rank))).collect();
    let want = mean(mesh, &parts);
    for got in hsdp::launch(4, WorldOptions::default(), |world| {
        let rank = world.rank().index();
        let mut model = sharded(world, TINY.spec(), mesh);
        let gradients = step(&mut model, |pass| loss(pass, rank)).expect("a step");
        gradients.full(&model)
    }) {
        assert_same_bits(&got.expect("a gather"), &want);
    }
}

/// Rank r has r batches, and rank 0 has none. The GPT's `root` is kept, because it is used at both
/// ends.
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

    let means = hsdp::launch(4, WorldOptions::default(), |world| -> Result<f64, Error> {
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

fn gpt() -> Gpt {
    Gpt::new(TINY).expect("sizes that fit")
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
