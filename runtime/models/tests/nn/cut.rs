//! A model of candle-transformers whose layers have no backward, trained as it is.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Activation, loss::cross_entropy};
use candle_transformers::models::qwen2;
use hsdp::{Error as RuntimeError, GradientError, Optimizer, RankFailure};
use hsdp::{Mesh, ModelOptions, Sgd, SgdOptions, ShardedModel, StepOptions, World, WorldOptions};
use hsdp_candle::{Error, Pass, Recorded, UnitsExt, record, var_builder};

const LAYERS: usize = 2;

fn config() -> qwen2::Config {
    qwen2::Config {
        vocab_size: 13,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: LAYERS,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 16,
        sliding_window: 16,
        max_window_layers: LAYERS,
        tie_word_embeddings: true,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}

/// The loss of the last token.
fn loss(pass: &Pass<'_>) -> Result<Tensor> {
    let tokens = Tensor::from_vec(vec![1_u32, 5, 2, 7, 3, 11], (2, 3), &Device::Cpu)?;
    let logits = pass.unit("root", &tokens, |p, tokens| {
        qwen2::ModelForCausalLM::new(&config(), var_builder(p))?.forward(tokens, 0)
    })?;
    cross_entropy(&logits.squeeze(1)?, &Tensor::new(&[4_u32, 9], &Device::Cpu)?)
}

/// A step as a program makes it that chooses no policy.
fn train(world: World, recorded: &Recorded) -> std::result::Result<(), Error> {
    let options = ModelOptions::on(Mesh::new(1, 2)?);
    let mut model = ShardedModel::new(world, recorded.spec(&["root"])?, options, recorded.init(7))?;
    let mut sgd = Sgd::new(&model, SgdOptions::default());
    let mut step = model.begin_step(StepOptions::microbatches(1))?;
    let pass = Pass::new(step.microbatch()?)?;
    let loss = loss(&pass)?;
    pass.backward(&loss, 2)?;
    let gradients = step.finish()?;
    sgd.step(&mut model, gradients)?;
    Ok(())
}

/// The last norm cuts off all parameters but the embedding, which is the head too.
#[test]
fn qwen2_of_candle_transformers_is_refused_with_all_parameters_that_it_would_not_train() {
    let recorded = record(|vb| qwen2::ModelForCausalLM::new(&config(), vb)).expect("a model");
    let all = recorded.params().map(|param| param.name.clone());
    let mut cut: Vec<String> = all.filter(|name| name != "model.embed_tokens.weight").collect();
    cut.sort();
    assert_eq!(cut.len(), 25);
    let mut told = Vec::new();
    let rank = |world| Ok::<_, RankFailure>(train(world, &recorded));
    for end in hsdp::launch(2, WorldOptions::default(), rank) {
        let error = end.expect("no panic").expect_err("most parameters have no gradient");
        let text = error.to_string();
        let Error::Runtime(RuntimeError::Gradients(GradientError::WithoutGradient {
            trainable: 26,
            mut parameters,
            ..
        })) = error
        else {
            panic!("{text}")
        };
        assert!(parameters.iter().all(|name| text.contains(name.as_str())), "{text}");
        assert!(text.contains("rms_norm") && text.contains("hsdp_models::nn"), "{text}");
        parameters.sort();
        assert_eq!(parameters, cut);
        told.push(text);
    }
    assert_eq!(told[0], told[1]);
}
