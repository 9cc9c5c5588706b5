//! Sequences in a safetensors file.

use std::path::Path;

use hsdp_train::{Digest, file};
use safetensors::{Dtype, SafeTensors};

use super::{Data, DataError, TokenSequences, TrainingData};
use crate::decoder::DecoderConfig;
use crate::nn::IGNORED;

/// Maximum number of bytes of a file of batches.
const MAX_BYTES: u64 = 1 << 30;

/// Tensors of such a file. Another one, such as a mask, would have no effect.
const TENSORS: [&str; 4] = ["input_ids", "labels", "eval_input_ids", "eval_labels"];

impl Data {
    /// Reads a safetensors file of at most 1 GiB: `input_ids` (u32) and `labels` (i64, shifted,
    /// [`IGNORED`] where one does not count), `[steps, sequences, length]`, and perhaps
    /// `eval_input_ids` and `eval_labels`, `[sequences, length]`, which are held out.
    ///
    /// # Errors
    /// [`DataError`]: also if the model of `config` cannot read the tokens, if the sequences of a
    /// step cannot be dealt to `ranks` times `microbatches`, or if a step has no label that counts.
    pub fn read_batches(
        path: &Path,
        config: &DecoderConfig,
        ranks: usize,
        microbatches: usize,
    ) -> Result<Self, DataError> {
        let bytes = file::read(path, MAX_BYTES)?;
        parse(&bytes, config, ranks, microbatches)
            .map_err(|problem| DataError::Content { path: path.to_owned(), problem })
    }
}

fn parse(
    bytes: &[u8],
    config: &DecoderConfig,
    ranks: usize,
    microbatches: usize,
) -> Result<Data, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
    let mut names = file.names();
    names.sort_unstable();
    if let Some(name) = names.into_iter().find(|name| !TENSORS.contains(name)) {
        let name = name.escape_debug();
        return Err(format!("tensor {name} is none of {}", TENSORS.join(", ")));
    }
    let (sequences, shape) = sequences(&file, ["input_ids", "labels"], config)?;
    let [_, of_step, length] = shape[..] else {
        return Err(format!("input_ids has shape {shape:?}, not [steps, sequences, length]"));
    };
    if of_step == 0 || !of_step.is_multiple_of(ranks * microbatches) {
        return Err(format!(
            "a step of {of_step} sequences cannot be dealt to {ranks} ranks x {microbatches} \
             microbatches"
        ));
    }
    let counts = |labels: &[i64]| labels.iter().any(|label| *label != IGNORED);
    let mut of_steps = sequences.labels.chunks(of_step * length);
    if let Some(step) = of_steps.position(|labels| !counts(labels)) {
        return Err(format!("step {step} has no label that counts"));
    }
    let held_out = held_out(&file, config)?;
    let batch = of_step / (ranks * microbatches);
    let training = TrainingData::Batches { sequences, of_step, microbatches };
    let digest = Digest::of(bytes);
    let warnings = Vec::new();
    Ok(Data { training, held_out, batch, length, item: "token", digest, warnings })
}

/// Reads the held-out sequences; none if the file has none.
fn held_out(file: &SafeTensors<'_>, config: &DecoderConfig) -> Result<TokenSequences, String> {
    const NAMES: [&str; 2] = ["eval_input_ids", "eval_labels"];
    if NAMES.iter().all(|name| file.tensor(name).is_err()) {
        return Ok(TokenSequences::default());
    }
    let (sequences, shape) = sequences(file, NAMES, config)?;
    match shape[..] {
        [_, _] if sequences.labels.iter().any(|label| *label != IGNORED) => Ok(sequences),
        [_, _] => Err("eval_labels has no label that counts".to_owned()),
        _ => Err(format!("eval_input_ids has shape {shape:?}, not [sequences, length]")),
    }
}

/// Reads a tensor of tokens and one of labels. Returns them with their shape.
fn sequences(
    file: &SafeTensors<'_>,
    [ids, labels]: [&str; 2],
    config: &DecoderConfig,
) -> Result<(TokenSequences, Vec<usize>), String> {
    let (tokens, shape) = elements(file, ids, Dtype::U32, u32::from_le_bytes)?;
    let (of_labels, other) = elements(file, labels, Dtype::I64, i64::from_le_bytes)?;
    if shape != other {
        return Err(format!("{labels} has shape {other:?}, and {ids} {shape:?}"));
    }
    let length = shape.last().copied().unwrap_or_default();
    let most = config.max_position_embeddings;
    let vocabulary = config.vocab_size;
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
    Ok((TokenSequences { tokens, labels: of_labels, length }, shape))
}

/// Reads the elements of a tensor. Returns them with its shape.
fn elements<const SIZE: usize, T>(
    file: &SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    read: fn([u8; SIZE]) -> T,
) -> Result<(Vec<T>, Vec<usize>), String> {
    let tensor = file.tensor(name).map_err(|_| format!("there is no tensor {name}"))?;
    if tensor.dtype() != dtype {
        return Err(format!("{name} is {:?}, not {dtype:?}", tensor.dtype()));
    }
    let (chunks, _) = tensor.data().as_chunks::<SIZE>();
    Ok((chunks.iter().map(|bytes| read(*bytes)).collect(), tensor.shape().to_vec()))
}
