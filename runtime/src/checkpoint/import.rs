//! Models of folders as Hugging Face has them: each rank reads its own part of each tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{Folder, LinkedDisk};
use hsdp_comm::World;
use hsdp_sharding::ModelSpec;

use super::portions;
use super::together::{Kind, Problem, Together};
use crate::engine::fabric::Fabric;
use crate::engine::shard::Shard;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::options::ModelOptions;

/// From where a model is imported.
pub struct Import<'a> {
    folder: PathBuf,
    /// The folder's tensor of a parameter, by the name of each.
    names: Box<dyn Fn(&str) -> String + Send + Sync + 'a>,
}

impl<'a> Import<'a> {
    /// A folder with `model.safetensors`, or with several files and `model.safetensors.index.json`. Its tensors have the names of
    /// parameters. Links in it are followed.
    #[must_use]
    pub fn of(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), names: Box::new(str::to_owned) }
    }

    /// The same, where `names` says which tensor a parameter is; two may be one.
    #[must_use]
    pub fn naming(self, names: impl Fn(&str) -> String + Send + Sync + 'a) -> Self {
        Self { names: Box::new(names), ..self }
    }
}

impl fmt::Debug for Import<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Import").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// A model that was imported.
#[derive(Debug)]
pub struct Imported {
    /// The model.
    pub model: ShardedModel,
    /// Tensors of the folder that are no parameter of it, by name.
    pub left_over: Vec<String>,
}

impl ShardedModel {
    /// As [`new`](Self::new), of the parameters in a folder. Each rank reads the elements of its own shards and no others, as f32: what it
    /// has beside these is a block of a file.
    ///
    /// Collective over the world.
    ///
    /// # Errors
    /// As of [`new`](Self::new), and [`Error::Checkpoint`] on all ranks: with all tensors that are missing or of another shape, or if the
    /// folder cannot be read. [`Error::Disagreement`] also if ranks have read different folders.
    pub fn import(
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
        import: &Import<'_>,
    ) -> Result<Imported, Error> {
        let fabric = Self::fabric(world, spec, options)?;
        let together = Together::new(&fabric, ("importing", 0));
        let (shards, left_over) = together.run(|| {
            let folder = Folder::open(Arc::new(LinkedDisk), &import.folder)?;
            let left_over = compare(&fabric, &folder, import)?;
            Ok((read(&fabric, &folder, import)?, left_over))
        })?;
        Ok(Imported { model: Self::of(fabric, shards)?, left_over })
    }
}

/// What the folder has beyond the model's parameters.
fn compare(fabric: &Fabric, folder: &Folder, import: &Import<'_>) -> Result<Vec<String>, Problem> {
    let tensors: BTreeMap<&str, &[u64]> = folder.tensors().collect();
    let (mut used, mut wrong) = (BTreeSet::new(), Vec::new());
    for param in fabric.plan.spec().units().iter().flat_map(|unit| &unit.params) {
        let name = (import.names)(&param.name);
        let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
        match tensors.get(&*name) {
            None => wrong.push(format!("`{name}` is missing")),
            Some(found) if *found != shape => {
                wrong.push(format!("`{name}` has shape {found:?}, not {shape:?}"));
            }
            Some(_) => {}
        }
        used.insert(name);
    }
    let left_over = tensors.into_keys().filter(|name| !used.contains(*name));
    let left_over: Vec<String> = left_over.map(str::to_owned).collect();
    if wrong.is_empty() {
        return Ok(left_over);
    }
    wrong.extend(left_over.iter().map(|name| format!("`{name}` is left over")));
    let folder = import.folder.display();
    let what = format!("{folder} is of another model: {}", wrong.join("; "));
    Err(Problem { kind: Kind::Lasting, what })
}

fn read(fabric: &Fabric, folder: &Folder, import: &Import<'_>) -> Result<Vec<Shard>, Problem> {
    let mut masters: Vec<Vec<f32>> = {
        let _shard = fabric.scope_of_masters();
        fabric.plan.layouts().iter().map(|layout| vec![0.0; layout.shard_len()]).collect()
    };
    for portion in portions::of_rank(fabric) {
        let elements = &mut masters[portion.unit.index()][portion.range];
        folder.read(&(import.names)(&portion.name), portion.offset, elements)?;
    }
    let shards = masters.into_iter().map(|master| Shard::new(fabric, master));
    Ok(shards.collect::<Result<_, Error>>()?)
}
