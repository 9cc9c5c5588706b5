//! Batches in a safetensors file.

use std::path::Path;

use hsdp_models::decoder::DecoderConfig;
use hsdp_models::nn::IGNORED;
use hsdp_train::{Digest, file};
use safetensors::{Dtype, SafeTensors};

use super::data::{Place, Sequences};
use super::shared::failure::Failure;
use super::shared::options::RunOptions;

/// The most bytes of a file of batches.
const MAX_BYTES: u64 = 1 << 30;

/// The tensors of such a file. Another, a mask for example, would have no effect.
const TENSORS: [&str; 4] = ["input_ids", "labels", "eval_input_ids", "eval_labels"];

/// Sequences by step, and those that are held out.
#[derive(Debug)]
pub(crate) struct Batches {
    training: Sequences,
    held_out: Sequences,
    /// The sequences of a step.
    of_step: usize,
    microbatches: usize,
    /// The sequences of a microbatch.
    of_microbatch: usize,
    digest: Digest,
}

impl Batches {
    /// Reads a file, and checks that the model can read its tokens and that the mesh can deal its sequences.
    pub(crate) fn read(
        path: &Path,
        config: &DecoderConfig,
        options: &RunOptions,
    ) -> Result<Self, Failure> {
        let bytes = file::read(path, MAX_BYTES).map_err(Failure::input)?;
        let refuse = |problem: String| Failure::Input(format!("{}: {problem}", path.display()));
        let batches = Self::parse(&bytes, config, options).map_err(refuse)?;
        Ok(batches)
    }

    fn parse(bytes: &[u8], config: &DecoderConfig, options: &RunOptions) -> Result<Self, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        let mut names = file.names();
        names.sort_unstable();
        if let Some(name) = names.into_iter().find(|name| !TENSORS.contains(name)) {
            return Err(format!(
                "tensor {} is none of {}",
                name.escape_debug(),
                TENSORS.join(", ")
            ));
        }
        let (training, shape) = sequences(&file, ["input_ids", "labels"], config)?;
        let [steps, of_step, _] = shape[..] else {
            return Err(format!("input_ids has shape {shape:?}, not [steps, sequences, length]"));
        };
        let places = options.mesh.world_size() * options.microbatches;
        if of_step == 0 || !of_step.is_multiple_of(places) {
            return Err(format!(
                "a step of {of_step} sequences cannot be dealt to {} ranks x {} microbatches",
                options.mesh.world_size(),
                options.microbatches
            ));
        }
        let counts = |step: usize| {
            training
                .part(step * of_step, (step + 1) * of_step)
                .labels
                .iter()
                .any(|it| *it != IGNORED)
        };
        if let Some(step) = (0..steps).find(|step| !counts(*step)) {
            return Err(format!("step {step} has no label that counts"));
        }
        Ok(Self {
            training,
            held_out: held_out(&file, config)?,
            of_step,
            microbatches: options.microbatches,
            of_microbatch: of_step / places,
            digest: Digest::of(bytes),
        })
    }

    /// The number of steps.
    pub(crate) fn steps(&self) -> usize {
        self.training.count() / self.of_step
    }

    /// A block of the step's sequences: ranks have consecutive blocks, and so have the microbatches of a rank.
    pub(crate) fn microbatch(&self, Place { step, microbatch, rank }: Place) -> Sequences {
        let block = rank.index() * self.microbatches + microbatch;
        let from = step * self.of_step + block * self.of_microbatch;
        self.training.part(from, from + self.of_microbatch)
    }

    pub(crate) fn held_out(&self) -> &Sequences {
        &self.held_out
    }

    pub(crate) fn tokens(&self) -> usize {
        self.of_microbatch * self.training.length
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }
}

/// The held-out sequences; none if the file has none.
fn held_out(file: &SafeTensors<'_>, config: &DecoderConfig) -> Result<Sequences, String> {
    const NAMES: [&str; 2] = ["eval_input_ids", "eval_labels"];
    if NAMES.iter().all(|name| file.tensor(name).is_err()) {
        return Ok(Sequences::default());
    }
    let (sequences, shape) = sequences(file, NAMES, config)?;
    match shape[..] {
        [_, _] if sequences.labels.iter().any(|label| *label != IGNORED) => Ok(sequences),
        [_, _] => Err("eval_labels has no label that counts".to_owned()),
        _ => Err(format!("eval_input_ids has shape {shape:?}, not [sequences, length]")),
    }
}

/// A tensor of tokens and one of labels, and their shape.
fn sequences(
    file: &SafeTensors<'_>,
    [ids, labels]: [&str; 2],
    config: &DecoderConfig,
) -> Result<(Sequences, Vec<usize>), String> {
    let (tokens, shape) = elements(file, (ids, Dtype::U32), u32::from_le_bytes)?;
    let (of_labels, other) = elements(file, (labels, Dtype::I64), i64::from_le_bytes)?;
    if shape != other {
        return Err(format!("{labels} has shape {other:?}, and {ids} {shape:?}"));
    }
    let length = shape.last().copied().unwrap_or_default();
    let (most, vocabulary) = (config.max_position_embeddings, config.vocab_size);
    if length == 0 || length > most {
        return Err(format!(
            "a sequence of {ids} has {length} tokens: the model reads 1 to {most}"
        ));
    }
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
        return Err(format!("{ids} has token {token}: the model has {vocabulary}"));
    }
    let is_wrong = |label: &&i64| {
        **label != IGNORED && usize::try_from(**label).map_or(true, |label| label >= vocabulary)
    };
    if let Some(label) = of_labels.iter().find(is_wrong) {
        return Err(format!(
            "{labels} has label {label}, which is neither below {vocabulary} nor {IGNORED}"
        ));
    }
    Ok((Sequences { tokens, labels: of_labels, length }, shape))
}

/// The elements of a tensor and its shape.
fn elements<const SIZE: usize, T>(
    file: &SafeTensors<'_>,
    (name, dtype): (&str, Dtype),
    read: fn([u8; SIZE]) -> T,
) -> Result<(Vec<T>, Vec<usize>), String> {
    let tensor = file.tensor(name).map_err(|_| format!("there is no tensor {name}"))?;
    if tensor.dtype() != dtype {
        return Err(format!("{name} is {:?}, not {dtype:?}", tensor.dtype()));
    }
    let (chunks, _) = tensor.data().as_chunks::<SIZE>();
    Ok((chunks.iter().map(|bytes| read(*bytes)).collect(), tensor.shape().to_vec()))
}
