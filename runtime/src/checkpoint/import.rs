//! Models from folders in the layout of Hugging Face: each rank reads its own part of each tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{Folder, LinkedDisk};
use hsdp_comm::World;
use hsdp_sharding::ModelSpec;

use super::load::shards_of;
use super::together::{Kind, Problem, Together};
use crate::engine::fabric::Fabric;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::options::ModelOptions;

/// The folder from which a model is imported.
pub struct Import<'a> {
    folder: PathBuf,
    /// Maps the name of a parameter to the name of its tensor in the folder.
    names: Box<dyn Fn(&str) -> String + Send + Sync + 'a>,
}

impl<'a> Import<'a> {
    /// A folder with `model.safetensors`, or with several files and `model.safetensors.index.json`. Its tensors have the names of
    /// parameters. Links in it are followed.
    #[must_use]
    pub fn of(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), names: Box::new(str::to_owned) }
    }

    /// The same folder, where `names` maps the name of a parameter to the name of its tensor. Two parameters may have
    /// one tensor.
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
    /// The names of the folder's tensors that are not parameters of the model.
    pub left_over: Vec<String>,
}

impl ShardedModel {
    /// As [`new`](Self::new), with the parameters of a folder. Each rank reads only the elements of its own shards, as
    /// f32. Beside its shards it holds one block of a file in memory. Parameters that are [stored](hsdp_sharding::Param::stored_in) in
    /// the compute dtype are rounded once, to nearest, ties to even; one unit of them at a time is held in f32.
    ///
    /// Collective over the world.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and [`Error::Checkpoint`] on all ranks if tensors are missing or have another
    /// shape, all of which it names, or if the folder cannot be read. [`Error::Disagreement`] also if ranks have read
    /// different folders.
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
            let shards = shards_of(&fabric, |portion, elements| {
                Ok(folder.read(&(import.names)(&portion.name), portion.offset, elements)?)
            })?;
            Ok((shards, left_over))
        })?;
        Ok(Imported { model: Self::of(fabric, shards)?, left_over })
    }
}

/// The folder's tensors that are not parameters of the model. Fails if a parameter's tensor is missing or has another
/// shape.
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
    wrong.extend(left_over.iter().map(|name| format!("`{name}` is not in the model")));
    let folder = import.folder.display();
    let what = format!("{folder} is of another model: {}", wrong.join("; "));
    Err(Problem { kind: Kind::Lasting, what })
}
