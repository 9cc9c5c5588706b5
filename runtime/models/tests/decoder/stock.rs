//! Whole parameters that train without the runtime, by a Llama of candle's own ops, or by a
//! decoder.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::rotary_emb::rope_slow;
use hsdp::checkpoint::Folder;
use hsdp::checkpoint::format::LinkedDisk;
use hsdp::kernels::{self, AdamWStep};
use hsdp_candle::Plain;
use hsdp_models::decoder::{Decoder, DecoderConfig};
use hsdp_models::nn::{CrossEntropy, IGNORED, composed};

use crate::batches::Batches;
use crate::run::{Numbers, norms};

type Values = BTreeMap<String, Vec<f32>>;

/// The arithmetic of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arithmetic {
    /// A Llama of candle's own ops.
    Stock,
    /// The decoder itself.
    Decoder,
}

/// Whole parameters, and the state of AdamW for them.
pub(crate) struct Stock {
    arithmetic: Arithmetic,
    decoder: Decoder,
    shapes: BTreeMap<String, Vec<usize>>,
    trained: Vec<String>,
    pub(crate) values: Values,
    moments: [Values; 2],
}

impl Stock {
    /// Reads the model of a folder. Parameters that it does not have begin as `decoder` says.
    pub(crate) fn read(decoder: &Decoder, folder: &Path, arithmetic: Arithmetic) -> Self {
        let files = std::sync::Arc::new(LinkedDisk);
        let folder = Folder::open(files, folder).expect("a folder of a model");
        let there: Vec<String> = folder.tensors().map(|(name, _)| name.to_owned()).collect();
        let init = decoder.recorded().expect("a model").init(crate::run::SEED);
        let spec = decoder.spec().expect("a model");
        let params = || spec.params().map(|(_, param)| param);
        let value = |param: &hsdp::Param| match there.contains(&param.name) {
            true => folder.read_whole(&param.name, &param.shape).expect("a tensor"),
            false => init(param),
        };
        let named = |values: Vec<Vec<f32>>| -> Values {
            params().map(|param| param.name.clone()).zip(values).collect()
        };
        let zeros = || named(params().map(|param| vec![0.0; param.numel()]).collect());
        let is_trained = |param: &&hsdp::Param| param.role == hsdp::sharding::Role::Trainable;
        Self {
            arithmetic,
            decoder: decoder.clone(),
            shapes: params().map(|param| (param.name.clone(), param.shape.clone())).collect(),
            trained: params().filter(is_trained).map(|param| param.name.clone()).collect(),
            values: named(params().map(value).collect()),
            moments: [zeros(), zeros()],
        }
    }

    /// Trains on whole steps, without a mesh.
    pub(crate) fn train(mut self, batches: &Batches, steps: usize) -> Numbers {
        let mut numbers = Numbers::default();
        numbers.held_out[0] = self.held_out(batches);
        for step in 0..steps {
            let [tokens, labels] = batches.training.each_ref().map(|all| all.get(step));
            let (loss, gradients) = self
                .gradients(&tokens.expect("a step"), &labels.expect("a step"))
                .expect("plain candle");
            let by_name = norms(&gradients);
            let norm = by_name.values().map(|norm| norm.powi(2)).sum::<f64>().sqrt();
            numbers.losses.push(loss);
            numbers.norms.push(norm);
            if step == 0 {
                numbers.first = by_name;
            }
            self.update(&gradients, step as u64 + 1, norm);
        }
        numbers.held_out[1] = self.held_out(batches);
        numbers
    }

    fn held_out(&self, batches: &Batches) -> f64 {
        let [tokens, labels] = &batches.held_out;
        let loss = self.forward(tokens, labels).and_then(|(_, loss)| loss.mean());
        f64::from(loss.and_then(|loss| loss.to_scalar::<f32>()).expect("plain candle"))
    }

    /// Computes the loss. Returns the parameters with it.
    fn forward(
        &self,
        tokens: &Tensor,
        labels: &Tensor,
    ) -> Result<(BTreeMap<String, Var>, CrossEntropy)> {
        match self.arithmetic {
            Arithmetic::Stock => {
                let vars = self.vars();
                let loss = self.loss(&vars, tokens, labels)?;
                Ok((vars, loss))
            }
            Arithmetic::Decoder => {
                let spec = self.decoder.spec().expect("a model");
                let plain = Plain::new(spec, &self.values, hsdp::Precision::default())?;
                let loss = self.decoder.loss(&plain, tokens, labels)?;
                Ok((plain.parameters().clone(), loss))
            }
        }
    }

    fn vars(&self) -> BTreeMap<String, Var> {
        let var = |(name, values): (&String, &Vec<f32>)| {
            let tensor = Tensor::from_slice(values, self.shapes[name].as_slice(), &Device::Cpu);
            (name.clone(), tensor.and_then(|it| Var::from_tensor(&it)).expect("a variable"))
        };
        self.values.iter().map(var).collect()
    }

    /// Computes the loss, and the gradients of trainable parameters.
    pub(crate) fn gradients(&self, tokens: &Tensor, labels: &Tensor) -> Result<(f64, Values)> {
        let (vars, loss) = self.forward(tokens, labels)?;
        let loss = loss.mean()?;
        let gradients = loss.backward()?;
        let of = |name: &String| {
            let gradient = gradients.get(&vars[name]).expect("a gradient");
            Ok((name.clone(), gradient.flatten_all()?.to_vec1()?))
        };
        let values = self.trained.iter().map(of).collect::<Result<_>>()?;
        Ok((f64::from(loss.to_scalar::<f32>()?), values))
    }

    #[expect(clippy::cast_possible_truncation, reason = "a factor of at most 1")]
    fn update(&mut self, gradients: &Values, step: u64, norm: f64) {
        let clip = (1.0 / (norm + 1e-6)).min(1.0) as f32;
        for (name, gradient) in gradients {
            let weight_decay = if self.shapes[name].len() >= 2 { 0.1 } else { 0.0 };
            let step = AdamWStep {
                learning_rate: 2e-3,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay,
                step,
                clip,
            };
            let [first, second] = &mut self.moments;
            let of = |all: &mut Values| std::mem::take(all.get_mut(name).expect("a parameter"));
            let mut value = of(&mut self.values);
            let mut one = of(first);
            let mut two = of(second);
            kernels::adamw(&step, &mut value, gradient, &mut one, &mut two);
            for (all, it) in [(&mut self.values, value), (first, one), (second, two)] {
                all.insert(name.clone(), it);
            }
        }
    }

    fn loss(
        &self,
        vars: &BTreeMap<String, Var>,
        tokens: &Tensor,
        labels: &Tensor,
    ) -> Result<CrossEntropy> {
        let config = self.decoder.config();
        let get = |name: &str| vars[name].as_tensor();
        let embedding = get("model.embed_tokens.weight");
        let shape = (tokens.dims()[0], tokens.dims()[1], config.hidden_size);
        let mut x = embedding.index_select(&tokens.flatten_all()?, 0)?.reshape(shape)?;
        for layer in 0..config.num_hidden_layers {
            x = Block { vars, name: format!("model.layers.{layer}"), config }.forward(&x)?;
        }
        let normed = rms_norm(&x, get("model.norm.weight"), config.rms_norm_eps)?;
        let head = if config.tie_word_embeddings { embedding } else { get("lm_head.weight") };
        composed::cross_entropy(&matmul(&normed, head)?, labels, IGNORED)
    }
}

/// A block, with adapters if there are any.
struct Block<'a> {
    vars: &'a BTreeMap<String, Var>,
    name: String,
    config: &'a DecoderConfig,
}

impl Block<'_> {
    fn get(&self, name: &str) -> Option<&Tensor> {
        Some(self.vars.get(&format!("{}.{name}.weight", self.name))?.as_tensor())
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        rms_norm(x, self.get(name).expect("a norm"), self.config.rms_norm_eps)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let y = matmul(x, self.get(name).expect("a matrix"))?;
        let matrices = ["A", "B"].map(|it| self.get(&format!("{name}.lora_{it}")));
        let [Some(a), Some(b)] = matrices else { return Ok(y) };
        y + (matmul(&matmul(x, a)?, b)? * (8.0 / a.dims()[0] as f64))?
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = self.norm(x, "input_layernorm")?;
        let part = |it| self.linear(&normed, &format!("self_attn.{it}_proj"));
        let mixed = attention([part("q")?, part("k")?, part("v")?], self.config)?;
        let x = (x + self.linear(&mixed, "self_attn.o_proj")?)?;
        let normed = self.norm(&x, "post_attention_layernorm")?;
        let up = self.linear(&normed, "mlp.up_proj")?;
        let gated = (self.linear(&normed, "mlp.gate_proj")?.silu()? * up)?;
        &x + self.linear(&gated, "mlp.down_proj")?
    }
}

fn matmul(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)
}

fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// Attention with keys and values that are repeated for each query head.
fn attention([q, k, v]: [Tensor; 3], config: &DecoderConfig) -> Result<Tensor> {
    let (sequences, length, _) = q.dims3()?;
    let heads = config.num_attention_heads;
    let kv_heads = config.num_key_value_heads;
    let width = config.head_dim;
    let split = |x: &Tensor, heads| {
        x.reshape((sequences, length, heads, width))?.transpose(1, 2)?.contiguous()
    };
    let repeated = |x: Tensor| {
        let shape = (sequences, kv_heads, heads / kv_heads, length, width);
        x.unsqueeze(2)?.broadcast_as(shape)?.reshape((sequences, heads, length, width))
    };
    let (cos, sin) = rotations(length, config)?;
    let q = rope_slow(&split(&q, heads)?, &cos, &sin)?;
    let k = repeated(rope_slow(&split(&k, kv_heads)?, &cos, &sin)?)?;
    let v = repeated(split(&v, kv_heads)?)?;
    let scores = (q.matmul(&k.t()?)? / (width as f64).sqrt())?;
    let masked = |at: usize| if at % length > at / length { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> = (0..length * length).map(masked).collect();
    let mask = Tensor::from_vec(mask, (length, length), &Device::Cpu)?;
    let shares = candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?;
    shares.matmul(&v)?.transpose(1, 2)?.contiguous()?.flatten_from(2)
}

#[expect(clippy::cast_possible_truncation, reason = "theta is a number of f32")]
fn rotations(length: usize, config: &DecoderConfig) -> Result<(Tensor, Tensor)> {
    let width = config.head_dim;
    let theta = config.rope.theta as f32;
    let frequencies: Vec<f32> =
        (0..width / 2).map(|pair| 1.0 / theta.powf((2 * pair) as f32 / width as f32)).collect();
    let frequencies = Tensor::new(frequencies, &Device::Cpu)?.unsqueeze(0)?;
    let positions = Tensor::arange(0, length as u32, &Device::Cpu)?.to_dtype(DType::F32)?;
    let angles = positions.unsqueeze(1)?.matmul(&frequencies)?;
    Ok((angles.cos()?, angles.sin()?))
}
