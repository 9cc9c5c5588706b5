//! Reading a case from its folder.

use std::collections::BTreeMap;
use std::path::Path;

use hsdp::{AdamWOptions, Placement};
use hsdp_models::gpt::{Gpt, GptConfig};
use serde::Deserialize;

use super::{Expected, TrainCase};
use crate::conformance::CaseError;
use crate::conformance::case::{check_memory, check_microbatches, mesh, read_json, real_dtype};
use crate::conformance::tensors::TensorFile;

/// `case.json`.
#[derive(Deserialize)]
struct Described {
    name: String,
    mesh: [usize; 2],
    model: Model,
    steps: usize,
    microbatches: usize,
    batch: usize,
    param_dtype: String,
    reduce_dtype: String,
    adamw: AdamW,
    max_norm: f64,
    expected: Curves,
}

#[derive(Clone, Copy, Deserialize)]
struct Model {
    vocab: usize,
    context: usize,
    width: usize,
    heads: usize,
    layers: usize,
}

#[derive(Clone, Copy, Deserialize)]
struct AdamW {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
}

#[derive(Deserialize)]
struct Curves {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
}

impl TrainCase {
    /// Reads the case in the folder `dir`.
    ///
    /// # Errors
    /// [`CaseError`], as [`Case::read`](crate::conformance::Case::read) says.
    pub fn read(dir: &Path) -> Result<Self, CaseError> {
        let path = dir.join("case.json");
        let described: Described = read_json(&path)?;
        let mut case = described.understood().map_err(|what| CaseError::senseless(path, what))?;
        case.tokens = case.read_tokens(&dir.join("tokens.safetensors"))?;
        case.initial = case.read_parameters(&dir.join("init.safetensors"))?;
        if case.bounds().parameters.is_some() {
            case.expected.parameters =
                Some(case.read_parameters(&dir.join("expected.safetensors"))?);
        }
        Ok(case)
    }

    fn read_tokens(&self, path: &Path) -> Result<Vec<u32>, CaseError> {
        let ranks = self.mesh.world_size();
        let shape = [self.steps, self.microbatches, ranks, self.batch, self.model.context + 1];
        let tokens: Vec<i32> = TensorFile::read(path)?.take("tokens", &shape)?;
        let known = |token: i32| {
            let index =
                u32::try_from(token).ok().filter(|token| (*token as usize) < self.model.vocab);
            let what = || format!("token {token} is not in a vocabulary of {}", self.model.vocab);
            index.ok_or_else(|| CaseError::senseless(path, what()))
        };
        tokens.into_iter().map(known).collect()
    }

    fn read_parameters(&self, path: &Path) -> Result<BTreeMap<String, Vec<f32>>, CaseError> {
        let mut file = TensorFile::read(path)?;
        let spec = self.model.spec();
        let tensor =
            |param: &hsdp::Param| Ok((param.name.clone(), file.take(&param.name, &param.shape)?));
        spec.params().map(|(_, param)| param).map(tensor).collect()
    }
}

impl Described {
    fn understood(self) -> Result<TrainCase, String> {
        check_microbatches(self.microbatches)?;
        for (field, count) in [("steps", self.steps), ("batch", self.batch)] {
            if count == 0 {
                return Err(format!("{field} is 0: the least is 1"));
            }
        }
        for (field, curve) in
            [("loss", &self.expected.loss), ("grad_norm", &self.expected.grad_norm)]
        {
            if curve.len() != self.steps {
                return Err(format!(
                    "expected.{field} has {} steps, the case has {}",
                    curve.len(),
                    self.steps
                ));
            }
        }
        let Model { vocab, context, width, heads, layers } = self.model;
        let model = GptConfig { vocab, context, width, heads, layers };
        let gpt = Gpt::new(model).map_err(|error| error.to_string())?;
        let AdamW { lr: learning_rate, betas, eps, weight_decay } = self.adamw;
        let case = TrainCase {
            mesh: mesh(self.mesh)?,
            param_dtype: real_dtype("param_dtype", &self.param_dtype)?,
            reduce_dtype: real_dtype("reduce_dtype", &self.reduce_dtype)?,
            name: self.name,
            model,
            steps: self.steps,
            microbatches: self.microbatches,
            batch: self.batch,
            adamw: AdamWOptions { learning_rate, betas, eps, weight_decay },
            max_norm: self.max_norm,
            tokens: Vec::new(),
            initial: BTreeMap::new(),
            expected: Expected {
                loss: self.expected.loss,
                grad_norm: self.expected.grad_norm,
                parameters: None,
            },
        };
        let kept = gpt.kept(case.batch, case.param_dtype).parts();
        check_memory(model.spec(), &case.options(Placement::Host), &kept)?;
        Ok(case)
    }
}
