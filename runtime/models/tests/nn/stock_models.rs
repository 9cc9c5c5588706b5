//! Models of candle-transformers, used as they are, and their parameters that get no gradient. This
//! test measures the guide's table of them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use candle_core::{DType, Device, IndexOp, Module, Result, Shape, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::*;
use hsdp_candle::{DeclarationError, Error, LostGradients, Recorded, record};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A function of candle-nn without a backward.
#[derive(Clone, Copy)]
enum Cut {
    LayerNorm,
    RmsNorm,
    Softmax,
    Rope,
    RopeInterleaved,
    KvCache,
}

use Cut::{KvCache, LayerNorm, RmsNorm, Rope, RopeInterleaved, Softmax};

impl Cut {
    fn remedy(self) -> &'static str {
        match self {
            LayerNorm => "`layer_norm`",
            RmsNorm => "`rms_norm`",
            Softmax => "`softmax`",
            Rope => "`rope`",
            RopeInterleaved => "`rope_interleaved`",
            KvCache => "no `KvCache`",
        }
    }
}

/// Reads a small config: the keys of all models, and those of `others`, which come first.
fn config<T: DeserializeOwned>(others: Value) -> T {
    let mut keys = json!({
        "activation": "gelu", "activation_function": "gelu", "alibi": false,
        "attention_bias": false, "attention_dropout": 0.0, "attention_probs_dropout_prob": 0.0,
        "bias": true, "bos_token_id": 1, "d_ff": 24, "d_kv": 4, "d_model": 16,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 24, "decoder_layers": 2,
        "decoder_sparse_step": 1, "decoder_start_token_id": 0, "dim": 16, "dropout_rate": 0.0,
        "encoder_attention_heads": 4, "encoder_ffn_dim": 24, "encoder_layers": 2,
        "eos_token_id": 2, "forced_eos_token_id": 2, "global_attn_every_n_layers": 2,
        "global_rope_theta": 10000.0, "head_dim": 4, "hidden_act": "gelu",
        "hidden_activation": "gelu", "hidden_dim": 24, "hidden_dropout": 0.0,
        "hidden_dropout_prob": 0.0, "hidden_size": 16, "image_size": 8, "initializer_factor": 1.0,
        "initializer_range": 0.02, "intermediate_size": 24, "is_encoder_decoder": true,
        "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "local_attention": 8,
        "local_rope_theta": 10000.0, "max_position_embeddings": 32, "max_source_positions": 8,
        "max_target_positions": 32, "max_window_layers": 2, "mlp_bias": false,
        "mlp_fc1_bias": false, "mlp_fc2_bias": false, "moe_intermediate_size": 8,
        "multi_query": true, "n_embd": 16, "n_head": 4, "n_heads": 4, "n_inner": 24, "n_layer": 2,
        "n_layers": 2, "n_positions": 32, "new_decoder_architecture": false, "norm_epsilon": 1e-5,
        "norm_topk_prob": true, "num_attention_heads": 4, "num_channels": 3, "num_experts": 2,
        "num_experts_per_tok": 2, "num_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "num_layers": 2, "num_local_experts": 2, "num_mel_bins": 4,
        "pad_token_id": 0, "pad_vocab_size_multiple": 8, "parallel_attn": true,
        "partial_rotary_factor": 1.0, "patch_size": 4, "position_embedding_type": "absolute",
        "prenorm": false, "qk_layernorm": false, "qkv_bias": true, "qkv_proj_bias": false,
        "query_pre_attn_scalar": 4, "relative_attention_num_buckets": 8, "rms_norm_eps": 1e-5,
        "rope_local_base_freq": 10000.0, "rope_theta": 10000.0, "rotary_emb_base": 10000.0,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": false, "scale_embedding": false,
        "share_encoder_decoder_embeddings": true, "shared_expert_intermediate_size": 8,
        "sliding_window": 32, "sliding_window_pattern": 2, "tie_word_embeddings": false,
        "type_vocab_size": 2, "use_bias": true, "use_cache": false, "use_flash_attn": false,
        "use_qkv_bias": true, "use_sliding_window": false, "vocab_size": 32,
    });
    for (key, value) in others.as_object().into_iter().flatten() {
        keys[key] = value.clone();
    }
    serde_json::from_value(keys).expect("a config")
}

fn small<T: DeserializeOwned>() -> T {
    config(json!({}))
}

/// Two sequences of tokens.
fn tokens() -> Tensor {
    let tokens = [[3_u32, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]];
    Tensor::new(&tokens, &Device::Cpu).expect("tokens")
}

fn ones(dtype: DType) -> Tensor {
    Tensor::ones((2, 6), dtype, &Device::Cpu).expect("ones")
}

fn image(size: usize) -> Tensor {
    Tensor::zeros((1, 3, size, size), DType::F32, &Device::Cpu).expect("an image")
}

/// A model of the table.
struct Row {
    name: &'static str,
    measured: std::result::Result<(), Error>,
    /// Names of all parameters.
    parameters: Vec<String>,
    /// Parameters whose gradient does not reach all of their elements.
    partly: Vec<String>,
    cuts: &'static [Cut],
}

/// Checks a model. `load` makes it, and `forward` returns outputs that depend on all parameters.
fn row<M>(
    name: &'static str,
    cuts: &'static [Cut],
    load: impl Fn(VarBuilder<'static>) -> Result<M>,
    forward: impl Fn(M) -> Result<Tensor>,
) -> Row {
    let recorded = match record(&load) {
        Ok(recorded) => recorded,
        Err(error) => {
            let measured = Err(error);
            let parameters = Vec::new();
            let partly = Vec::new();
            return Row { name, measured, parameters, partly, cuts };
        }
    };
    let parameters = recorded.params().map(|param| param.name.clone()).collect();
    let measured = recorded.check_backward(|vb| forward(load(vb)?));
    let partly = match measured {
        Ok(()) | Err(Error::LostGradients(LostGradients::NoGradient { .. })) => {
            partly_cut(&recorded, &load, &forward).expect("a forward")
        }
        Err(_) => Vec::new(),
    };
    Row { name, measured, parameters, partly, cuts }
}

/// Finds parameters whose gradient is zero for elements on which the loss depends, as in a packed
/// weight of queries, keys and values that loses the first two.
fn partly_cut<M>(
    recorded: &Recorded,
    load: impl Fn(VarBuilder<'static>) -> Result<M>,
    forward: impl Fn(M) -> Result<Tensor>,
) -> Result<Vec<String>> {
    let vars = variables(recorded)?;
    let loss = || {
        let output = forward(load(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?)?;
        // Each element counts, and none of them as much as another.
        let factors = noise(&mut ChaCha8Rng::seed_from_u64(1), output.shape(), 1.0)?;
        (output * factors)?.sum_all()
    };
    let vars = vars.data().lock().expect("no panic").clone();
    let vars = BTreeMap::from_iter(vars);
    let mut random = ChaCha8Rng::seed_from_u64(44);
    for var in vars.values() {
        var.set(&(var.as_tensor() + noise(&mut random, var.shape(), 0.2)?)?)?;
    }
    let before = loss()?;
    let gradients = before.backward()?;
    let before = before.to_scalar::<f32>()?;
    let mut partly = Vec::new();
    for (name, var) in &vars {
        let Some(gradient) = gradients.get(var) else { continue };
        let unreached = gradient.eq(0.0)?.to_dtype(DType::F32)?;
        let value = var.as_tensor().copy()?;
        var.set(&(&value + (noise(&mut random, var.shape(), 0.05)? * unreached)?)?)?;
        if loss()?.to_scalar::<f32>()?.to_bits() != before.to_bits() {
            partly.push(name.clone());
        }
        var.set(&value)?;
    }
    Ok(partly)
}

/// Makes the variables of a model, with the same values in each run.
fn variables(recorded: &Recorded) -> Result<VarMap> {
    let vars = VarMap::new();
    let init = recorded.init(43);
    for param in recorded.params() {
        let var = Var::from_vec(init(param), &param.shape[..], &Device::Cpu)?;
        vars.data().lock().expect("no panic").insert(param.name.clone(), var);
    }
    Ok(vars)
}

#[test]
fn variables_have_the_same_values_in_each_run() {
    let recorded = record(|vb| candle_nn::linear(8, 4, vb)).expect("a layer");
    let [one, other] = [(); 2].map(|()| {
        let vars = variables(&recorded).expect("its variables");
        let vars = BTreeMap::from_iter(vars.data().lock().expect("no panic").clone());
        let values = |var: Var| var.flatten_all()?.to_vec1::<f32>();
        vars.into_values().map(values).collect::<Result<Vec<_>>>().expect("values")
    });
    assert_eq!(one.len(), 2);
    assert_eq!(one, other);
}

fn noise(random: &mut ChaCha8Rng, shape: &Shape, size: f32) -> Result<Tensor> {
    let values = (0..shape.elem_count()).map(|_| random.random_range(-size..size)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Returns the names of layers, without their numbers and in the order of `names`.
fn layers<'a>(names: impl IntoIterator<Item = &'a String>) -> Vec<&'a str> {
    let mut layers = Vec::new();
    for name in names {
        let (path, leaf) = name.rsplit_once('.').unwrap_or(("", name));
        let is_named = |part: &&str| !part.is_empty() && part.parse::<usize>().is_err();
        let layer = path.rsplit('.').find(is_named).unwrap_or(leaf);
        if !layers.contains(&layer) {
            layers.push(layer);
        }
    }
    layers
}

impl Row {
    /// Returns the columns of the table: the parameters without a gradient, and the replacements.
    fn columns(&self) -> (String, String) {
        let lost: &[String] = match &self.measured {
            Ok(()) => &[],
            Err(Error::LostGradients(LostGradients::NoGradient {
                parameters: names,
                trainable,
                ..
            })) => {
                assert_eq!(*trainable, self.parameters.len(), "{}", self.name);
                names
            }
            Err(Error::Declaration(DeclarationError::Buffers { .. })) => {
                return (
                    "refused by `record`".to_owned(),
                    "batch norm, by [that of hsdp](#batch-norm-over-all-ranks)".to_owned(),
                );
            }
            Err(other) => panic!("{}: {other}", self.name),
        };
        let all = self.parameters.len();
        let works = lost.is_empty() && self.partly.is_empty();
        assert_eq!(works, self.cuts.is_empty(), "{}: {lost:?}, {:?}", self.name, self.partly);
        if works {
            return ("none: it works as it is".to_owned(), String::new());
        }
        let kept = self.parameters.iter().filter(|name| !lost.contains(name));
        let some_lost = layers(lost);
        let some_kept = layers(kept);
        let mut text = match (some_lost.len(), some_kept.len()) {
            (_, 0) => format!("all {all}"),
            (0, _) => format!("0 of {all}"),
            (many, few) if few < many => {
                format!("{} of {all}, all but {}", lost.len(), quoted(&some_kept, &some_lost))
            }
            _ => format!("{} of {all}: {}", lost.len(), quoted(&some_lost, &some_kept)),
        };
        if !self.partly.is_empty() {
            text += &format!("; parts of {}", quoted(&layers(&self.partly), &[]));
        }
        let remedies: Vec<_> = self.cuts.iter().map(|cut| cut.remedy()).collect();
        (text, remedies.join(", "))
    }
}

/// Lists layers, and marks those that are also among `others`.
fn quoted(layers: &[&str], others: &[&str]) -> String {
    let quote = |layer: &&str| {
        let some = if others.contains(layer) { "some " } else { "" };
        format!("{some}`{layer}`")
    };
    layers.iter().map(quote).collect::<Vec<_>>().join(", ")
}

macro_rules! decoder {
    ($name:literal, $cuts:expr, $module:path, $model:ident) => {{
        use $module as module;
        row(
            $name,
            $cuts,
            |vb| module::$model::new(&small(), vb),
            |mut model| model.forward(&tokens(), 0),
        )
    }};
}

fn decoders() -> Vec<Row> {
    const NORM_ROPE: &[Cut] = &[RmsNorm, Rope, Softmax];
    vec![
        row(
            "bigcode",
            &[LayerNorm, Softmax],
            |vb| bigcode::GPTBigCode::load(vb, bigcode_config()),
            |mut model| model.forward(&tokens(), 0),
        ),
        row(
            "falcon",
            &[LayerNorm],
            |vb| falcon::Falcon::load(vb, small()),
            // It takes one sequence at a time.
            |mut model| model.forward(&tokens().i(..1)?),
        ),
        row(
            "gemma",
            &[Rope, Softmax],
            |vb| gemma::Model::new(false, &gemma_config(), vb),
            |mut m| m.forward(&tokens(), 0),
        ),
        row(
            "gemma2",
            &[Rope, Softmax],
            |vb| gemma2::Model::new(false, &small(), vb),
            |mut m| m.forward(&tokens(), 0),
        ),
        row(
            "gemma3",
            &[Rope, Softmax, KvCache],
            |vb| {
                let one = json!({ "num_key_value_heads": 1 });
                gemma3::Model::new(false, &config(one), vb)
            },
            |mut m| m.forward(&tokens(), 0),
        ),
        row(
            "granite",
            &[RmsNorm, Rope],
            |vb| granite::Granite::load(vb, &granite_config()),
            |model| {
                let config = granite_config();
                let mut cache = granite::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
                model.forward(&tokens(), 0, &mut cache)
            },
        ),
        decoder!("helium", &[RmsNorm, RopeInterleaved, Softmax], helium, Model),
        row(
            "llama",
            NORM_ROPE,
            |vb| llama::Llama::load(vb, &llama_config()),
            |model| {
                let config = llama_config();
                let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
                model.forward(&tokens(), 0, &mut cache)
            },
        ),
        row(
            "mamba",
            &[RmsNorm],
            |vb| mamba::Model::new(&small(), vb),
            |model| {
                // It takes one sequence at a time.
                let mut state = mamba::State::new(1, &small(), DType::F32, &Device::Cpu)?;
                let logits = |at| model.forward(&tokens().i((..1, at))?, &mut state);
                Tensor::stack(&(0..6).map(logits).collect::<Result<Vec<_>>>()?, 1)
            },
        ),
        decoder!("mistral", NORM_ROPE, mistral, Model),
        decoder!("mixtral", &[RmsNorm, Softmax], mixtral, Model),
        decoder!("olmo", &[Rope, Softmax], olmo, Model),
        decoder!("olmo2", NORM_ROPE, olmo2, Model),
        row(
            "phi",
            &[LayerNorm, Rope, Softmax],
            |vb| phi::Model::new(&small(), vb),
            |mut model| model.forward(&tokens()),
        ),
        decoder!("phi3", NORM_ROPE, phi3, Model),
        decoder!("qwen2", NORM_ROPE, qwen2, ModelForCausalLM),
        decoder!("qwen2_moe", NORM_ROPE, qwen2_moe, Model),
        decoder!("qwen3", NORM_ROPE, qwen3, ModelForCausalLM),
        decoder!("qwen3_moe", NORM_ROPE, qwen3_moe, ModelForCausalLM),
        decoder!("smollm3", &[RmsNorm, Rope, Softmax, KvCache], smol::smollm3, ModelForCausalLM),
        decoder!("stable_lm", &[LayerNorm, Softmax], stable_lm, Model),
        decoder!("starcoder2", &[LayerNorm, Softmax], starcoder2, Model),
    ]
}

fn gemma_config() -> gemma::Config {
    gemma::Config { hidden_act: None, ..small() }
}

fn granite_config() -> granite::Config {
    small::<granite::GraniteConfig>().into_config(false)
}

fn llama_config() -> llama::Config {
    small::<llama::LlamaConfig>().into_config(false)
}

fn bigcode_config() -> bigcode::Config {
    bigcode::Config {
        vocab_size: 32,
        max_position_embeddings: 32,
        num_hidden_layers: 2,
        hidden_size: 16,
        layer_norm_epsilon: 1e-5,
        n_inner: Some(24),
        num_attention_heads: 4,
        multi_query: true,
        use_cache: false,
    }
}

fn clip_config() -> clip::text_model::ClipTextConfig {
    clip::text_model::ClipTextConfig {
        vocab_size: 32,
        embed_dim: 16,
        intermediate_size: 24,
        max_position_embeddings: 32,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        projection_dim: 16,
        ..clip::text_model::ClipTextConfig::vit_base_patch32()
    }
}

fn encoders() -> Vec<Row> {
    let types = || tokens().zeros_like();
    vec![
        row(
            "bert",
            &[LayerNorm],
            |vb| bert::BertForMaskedLM::load(vb, &small()),
            |model| model.forward(&tokens(), &types()?, None),
        ),
        row(
            "clip (text)",
            &[LayerNorm],
            |vb| clip::text_model::ClipTextTransformer::new(vb, &clip_config()),
            |model| model.forward_with_mask(&tokens(), 5),
        ),
        row(
            "distilbert",
            &[LayerNorm],
            |vb| distilbert::DistilBertForMaskedLM::load(vb, &small()),
            |model| model.forward(&tokens(), &tokens().zeros_like()?.i(0)?.unsqueeze(0)?),
        ),
        row(
            "jina_bert",
            &[LayerNorm, Softmax],
            |vb| {
                let alibi = json!({ "position_embedding_type": "alibi" });
                jina_bert::BertModel::new(vb, &config(alibi))
            },
            |model| model.forward(&tokens()),
        ),
        row(
            "modernbert",
            &[Rope],
            |vb| modernbert::ModernBertForMaskedLM::load(vb, &small()),
            |model| model.forward(&tokens(), &ones(DType::F32)),
        ),
        row(
            "nomic_bert",
            &[LayerNorm, Rope, Softmax],
            |vb| {
                let swiglu = json!({ "activation_function": "swiglu" });
                nomic_bert::NomicBertModel::load(vb, &config(swiglu))
            },
            |model| model.forward(&tokens(), None, None),
        ),
        row(
            "xlm_roberta",
            &[LayerNorm, Softmax],
            |vb| xlm_roberta::XLMRobertaForMaskedLM::new(&small(), vb),
            |model| {
                let mask = ones(DType::F32);
                model.forward(&tokens(), &mask, &types()?, None, None, None)
            },
        ),
    ]
}

fn others() -> Vec<Row> {
    vec![
        row(
            "marian",
            &[LayerNorm, Softmax],
            |vb| marian::MTModel::new(&small(), vb),
            |mut model| {
                let encoded = model.encoder().forward(&tokens(), 0)?;
                model.decode(&tokens(), &encoded, 0)
            },
        ),
        row(
            "t5",
            &[Softmax],
            |vb| {
                let gated = json!({ "feed_forward_proj": "gated-gelu" });
                t5::T5ForConditionalGeneration::load(vb, &config(gated))
            },
            |mut model| model.forward(&tokens(), &tokens()),
        ),
        row(
            "whisper",
            &[LayerNorm, Softmax],
            |vb| whisper::model::Whisper::load(&vb, small()),
            |mut model| {
                let sound = Tensor::zeros((2, 4, 16), DType::F32, &Device::Cpu)?;
                let encoded = model.encoder.forward(&sound, true)?;
                let x = model.decoder.forward(&tokens(), &encoded, true)?;
                model.decoder.final_linear(&x)
            },
        ),
        row(
            "convnext",
            &[LayerNorm],
            |vb| convnext::convnext(&convnext::Config::atto(), 3, vb),
            |model| model.forward(&image(32)),
        ),
        row(
            "siglip (vision)",
            &[LayerNorm, Softmax],
            |vb| siglip::VisionModel::new(&small(), true, vb),
            |model| model.forward(&image(8)),
        ),
        row(
            "vit",
            &[LayerNorm, Softmax],
            |vb| vit::Model::new(&small(), 3, vb),
            |model| model.forward(&image(8)),
        ),
        row("convmixer", &[], |vb| convmixer::c1024_20(3, vb), |model| model.forward(&image(32))),
        row(
            "efficientvit",
            &[],
            |vb| efficientvit::efficientvit(&efficientvit::Config::m0(), 3, vb),
            |model| model.forward(&image(32)),
        ),
        row("resnet", &[], |vb| resnet::resnet18(3, vb), |model| model.forward(&image(32))),
    ]
}

fn table(rows: &[Row]) -> String {
    let mut table =
        String::from("| model | parameters without a gradient | replacements |\n|---|---|---|\n");
    for row in rows {
        let (lost, remedy) = row.columns();
        let _ = writeln!(table, "| `{}` | {lost} | {remedy} |", row.name);
    }
    table
}

/// Reads a file of the workspace.
fn file(path: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::fs::read_to_string(format!("{root}/{path}")).expect("a file of the workspace")
}

#[test]
fn the_table_of_the_guide_is_measured() {
    let rows: Vec<_> = decoders().into_iter().chain(encoders()).chain(others()).collect();
    let table = table(&rows);
    let guide = file("docs/guide.md");
    assert!(guide.contains(&table), "docs/guide.md lacks this table:\n{table}");
}

/// The replacements were read from the sources of one version of candle-transformers.
#[test]
fn the_guide_names_the_version_of_its_table() {
    let lock = file("Cargo.lock");
    let (_, entry) =
        lock.split_once("name = \"candle-transformers\"\nversion = \"").expect("an entry");
    let (version, _) = entry.split_once('"').expect("a version");
    let says = format!("candle-transformers {version}");
    assert!(file("docs/guide.md").contains(&says), "the guide's table is not of {says}");
}

/// Qwen2 with a head of its own. The norm before the head cuts all that lies below it.
#[test]
fn qwen2_loses_26_of_its_27_parameters() {
    let load = |vb: VarBuilder<'static>| {
        // Qwen2 ties its head to the embedding unless this tensor is there.
        vb.get((32, 16), "lm_head.weight")?;
        qwen2::ModelForCausalLM::new(&small(), vb)
    };
    let recorded = record(load).expect("a model");
    let loss = |vb| {
        let logits = load(vb)?.forward(&tokens(), 0)?.squeeze(1)?;
        candle_nn::loss::cross_entropy(&logits, &tokens().i((.., 0))?.contiguous()?)
    };
    let error = recorded.check_backward(loss).expect_err("a cut");
    let said = error.to_string();
    let Error::LostGradients(LostGradients::NoGradient {
        parameters: names, trainable: 27, ..
    }) = error
    else {
        panic!("{said}");
    };
    let all_but_the_head: Vec<_> =
        recorded.params().map(|it| it.name.as_str()).filter(|it| *it != "lm_head.weight").collect();
    assert_eq!(names, all_but_the_head);
    for part in [
        "26 of 27 trainable parameters get no gradient",
        "model.layers.{0,1}.self_attn.q_proj.{weight,bias}",
        "use `hsdp_models::nn::rms_norm`",
    ] {
        assert!(said.contains(part), "{said}");
    }
}
