//! Parameters of a folder as Hugging Face has models: each rank reads its own part of each tensor.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hsdp_checkpoint::{Disk, Folder};
use hsdp_kernels::memory::{self, Category};

use super::portions;
use super::together::{Kind, Problem, Together};
use crate::engine::fabric::Fabric;
use crate::engine::shard::Shard;
use crate::error::Error;
use crate::model::ShardedModel;

/// The folder's tensor of a parameter, by the name of each.
type Names<'a> = &'a (dyn Fn(&str) -> String + Sync);

/// What was imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Tensors of the folder that no parameter has asked for, by name.
    pub left_over: Vec<String>,
}

impl ShardedModel {
    /// Makes this model's parameters those of a folder: `model.safetensors`, or several files and `model.safetensors.index.json`. `names` says
    /// which tensor a parameter is. Each rank reads the elements of its own shards and no others, as f32.
    ///
    /// Collective over the world, before the first step: what an optimizer knows would be of other parameters.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks, and nothing has changed: with all tensors that are missing or of another shape, or that the folder
    /// cannot be read. [`Error::Misuse`] after a step, or within one; [`Error::Comm`].
    pub fn import(
        &mut self,
        folder: &Path,
        names: impl Fn(&str) -> String + Sync,
    ) -> Result<Imported, Error> {
        super::check_between_steps(self, "importing")?;
        let (fabric, step) = (&self.engine.fabric, self.committed_steps());
        if step > 0 {
            let what = "the model was trained already: import before the first step".to_owned();
            return Err(fabric.misuse("importing", step, what));
        }
        let together = Together::new(fabric, ("importing", step));
        let (shards, imported) = together.run(|| {
            let folder = Folder::open(Arc::new(Disk), folder)?;
            let left_over = compare(fabric, &folder, &names)?;
            Ok((read(fabric, &folder, &names)?, Imported { left_over }))
        })?;
        self.engine.state().shards = shards;
        Ok(imported)
    }
}

/// What the folder has beyond the model's parameters.
fn compare(fabric: &Fabric, folder: &Folder, names: Names<'_>) -> Result<Vec<String>, Problem> {
    let mut tensors: BTreeMap<&str, &[u64]> = folder.tensors().collect();
    let mut wrong = Vec::new();
    for param in fabric.plan.spec().units().iter().flat_map(|unit| &unit.params) {
        let name = names(&param.name);
        let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
        match tensors.remove(&*name) {
            None => wrong.push(format!("`{name}` is missing")),
            Some(found) if found != shape => {
                wrong.push(format!("`{name}` has shape {found:?}, not {shape:?}"));
            }
            Some(_) => {}
        }
    }
    let left_over: Vec<String> = tensors.into_keys().map(str::to_owned).collect();
    if wrong.is_empty() {
        return Ok(left_over);
    }
    wrong.extend(left_over.iter().map(|name| format!("`{name}` is left over")));
    let what = format!("the folder is of another model: {}", wrong.join("; "));
    Err(Problem { kind: Kind::Lasting, what })
}

fn read(fabric: &Fabric, folder: &Folder, names: Names<'_>) -> Result<Vec<Shard>, Problem> {
    let mut masters: Vec<Vec<f32>> = {
        let _shard = memory::scope(Category::Shard);
        fabric.plan.layouts().iter().map(|layout| vec![0.0; layout.shard_len()]).collect()
    };
    for portion in portions::of_rank(fabric) {
        let elements = &mut masters[portion.unit.index()][portion.range];
        folder.read(&names(&portion.name), portion.offset, elements)?;
    }
    let shards = masters.into_iter().map(|master| Shard::new(fabric, master));
    Ok(shards.collect::<Result<_, Error>>()?)
}
