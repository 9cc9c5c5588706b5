//! Models from folders in the layout of Hugging Face: each rank reads its own part of each tensor.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hsdp_checkpoint::{Folder, LinkedDisk};
use hsdp_comm::World;
use hsdp_sharding::{ModelSpec, Param, UnitId};

use super::differences;
use super::load::shards_of;
use super::portions::Portion;
use super::together::{JointOperation, OpenedLines};
use crate::agree::comparison::InitialValues;
use crate::error::Error;
use crate::model::{self, InitialTensors, ShardedModel};
use crate::options::ModelOptions;
use crate::persist::problem::Problem;
use crate::state::buffers::ModelBuffers;
use crate::state::context::Context;

/// The folder from which a model is imported.
pub struct Import<'a> {
    folder: PathBuf,
    /// Maps the name of a parameter to the name of its tensor in the folder.
    names: Box<dyn Fn(&str) -> String + Send + Sync + 'a>,
    /// The values of parameters whose tensors are missing.
    init: Option<Init<'a>>,
}

type Init<'a> = Box<dyn Fn(&Param) -> Vec<f32> + Send + Sync + 'a>;

impl<'a> Import<'a> {
    /// Chooses a folder with `model.safetensors`, or with several files and
    /// `model.safetensors.index.json`. As transformers does, an import reads the first where both
    /// are there. Its tensors have the names of parameters. Links in it are followed.
    #[must_use]
    pub fn of(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), names: Box::new(str::to_owned), init: None }
    }

    /// Sets the map from the name of a parameter to the name of its tensor. Two parameters may have
    /// one tensor.
    #[must_use]
    pub fn naming(self, names: impl Fn(&str) -> String + Send + Sync + 'a) -> Self {
        Self { names: Box::new(names), ..self }
    }

    /// Allows the folder to lack tensors, of parameters that are added to a model, for example.
    /// `init` returns the values of such a parameter, as that of [`ShardedModel::new`] does: in
    /// f32, row-major, `numel` elements, the same on all ranks. It is called once for each, in the
    /// order of the spec.
    #[must_use]
    pub fn or_init(self, init: impl Fn(&Param) -> Vec<f32> + Send + Sync + 'a) -> Self {
        Self { init: Some(Box::new(init)), ..self }
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
    /// The names of the folder's tensors that are neither parameters nor buffers of the model.
    pub left_over: Vec<String>,
    /// The names of the parameters and buffers that the folder lacks, in the order of the spec. They
    /// have the values of [`Import::or_init`].
    pub initialised: Vec<String>,
}

impl ShardedModel {
    /// Makes a model as [`new`](Self::new) does, with the parameters of a folder. Each rank reads
    /// only the elements of its own shards, as f32. Beside its shards it holds one block of a file
    /// in memory. Parameters that are [stored](hsdp_sharding::Param::stored_in) in the compute
    /// dtype are rounded once, to nearest, ties to even; one unit of them at a time is held in f32.
    ///
    /// The ranks may have copies of the folder in different places. Before they read values, they
    /// compare which tensors the folder has, where they lie in its files, [a sample of
    /// each](hsdp_checkpoint::Folder::contents), and the tensor of each parameter.
    ///
    /// Rank 0 warns of each of the folder's [oddities](Folder::oddities). Collective over the
    /// world.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::Checkpoint`] on all ranks: it names all
    /// tensors that have another shape, or are missing without [`Import::or_init`]; also if that
    /// returns another number of elements, or the folder cannot be read. [`Error::Disagreement`]
    /// also if the folders of two ranks differ, `or_init` returns different values on different
    /// ranks, or ranks that hold the same shard have read different values for it.
    pub fn import(
        world: World,
        spec: ModelSpec,
        options: ModelOptions,
        import: &Import<'_>,
    ) -> Result<Imported, Error> {
        let context = Self::context(world, spec, options)?;
        let together = JointOperation::new(&context, "importing", 0);
        let (folder, found, opened) = together.run(|| {
            let folder = Folder::open(Arc::new(LinkedDisk), &import.folder)?;
            warn_of_oddities(&context, &folder, &import.folder);
            let found = compare(&context, &folder, import)?;
            let opened = opened(&context, &folder, &found, import)?;
            Ok((folder, found, opened))
        })?;
        together.compare(&opened)??;
        let tensors = together.run(|| {
            let values = RefCell::new(InitialValues::default());
            let shards = shards_of(together.site(), |unit, portions, parameters| {
                let (missing, held): (Vec<_>, Vec<_>) =
                    portions.iter().partition(|it| found.missing.contains(&it.name));
                let given = &mut *values.borrow_mut();
                init(&context, unit, import, &found, &missing, parameters, given)?;
                read(&folder, import, &held, parameters)
            })?;
            let mut values = values.into_inner();
            let buffers = buffers(&context, &folder, import, &found, &mut values)?;
            Ok(InitialTensors { shards, buffers, values })
        })?;
        let ImportFound { left_over, missing } = found;
        let names = context.plan.spec().tensors().map(|tensor| &tensor.name);
        let initialised: Vec<String> =
            names.filter(|name| missing.contains(*name)).cloned().collect();
        Ok(Imported { model: Self::of(context, tensors)?, left_over, initialised })
    }
}

/// Returns the folder that this rank has opened: its tensors, and the one of each parameter.
fn opened(
    context: &Context,
    folder: &Folder,
    found: &ImportFound,
    import: &Import<'_>,
) -> Result<OpenedLines, Problem> {
    let mut lines = folder.contents()?;
    lines.extend(context.plan.spec().tensors().map(|tensor| match &tensor.name {
        name if found.missing.contains(name) => format!("no tensor for `{name}`"),
        name => format!("tensor `{}` for `{name}`", (import.names)(name).escape_debug()),
    }));
    Ok(OpenedLines { path: import.folder.display().to_string(), lines })
}

/// The differences between a folder and a model.
struct ImportFound {
    /// The folder's tensors that are not parameters of the model.
    left_over: Vec<String>,
    /// The parameters that have no tensor.
    missing: BTreeSet<String>,
}

/// Warns of a folder's contradictions, on rank 0.
fn warn_of_oddities(context: &Context, folder: &Folder, path: &Path) {
    if context.world.rank().index() == 0 {
        for what in folder.oddities() {
            hsdp_warnings::warn!(folder = %path.display(), %what, "the folder of a model contradicts \
                                                             itself");
        }
    }
}

/// Sets the portions of a unit that the folder lacks.
fn init(
    context: &Context,
    unit: UnitId,
    import: &Import<'_>,
    found: &ImportFound,
    portions: &[&Portion],
    parameters: &mut [f32],
    values: &mut InitialValues,
) -> Result<(), Problem> {
    let Some(init) = &import.init else { return Ok(()) };
    let params = context.plan.spec()[unit].params.iter();
    for param in params.filter(|param| found.missing.contains(&param.name)) {
        let full = init(param);
        model::check_size(context, param, &full)?;
        values.note(param, &full);
        for portion in portions.iter().filter(|portion| portion.name == param.name) {
            let from = usize::try_from(portion.offset).expect("it is within the parameter");
            let into = &mut parameters[portion.range.clone()];
            into.copy_from_slice(&full[from..from + into.len()]);
        }
    }
    Ok(())
}

/// Makes the buffers from the folder, or from `init` where it lacks them. All ranks compare the
/// values.
fn buffers(
    context: &Context,
    folder: &Folder,
    import: &Import<'_>,
    found: &ImportFound,
    values: &mut InitialValues,
) -> Result<ModelBuffers, Problem> {
    let spec = context.plan.spec();
    let mut buffers = ModelBuffers::zeros(spec).map_err(Error::from)?;
    for (id, buffer) in spec.buffers() {
        let full = match &import.init {
            Some(init) if found.missing.contains(&buffer.name) => init(buffer),
            _ => {
                let mut full = hsdp_kernels::zeros(buffer.numel()).map_err(Error::from)?;
                folder.read(&(import.names)(&buffer.name), 0, &mut full)?;
                full
            }
        };
        model::check_size(context, buffer, &full)?;
        values.note(buffer, &full);
        buffers.set(id, &full);
    }
    Ok(buffers)
}

/// Reads the portions of a unit that the folder has.
fn read(
    folder: &Folder,
    import: &Import<'_>,
    portions: &[&Portion],
    parameters: &mut [f32],
) -> Result<(), Problem> {
    for Portion { name, offset, range, .. } in portions {
        folder.read(&(import.names)(name), *offset, &mut parameters[range.clone()])?;
    }
    Ok(())
}

/// Compares a folder with the model. Fails if a parameter's tensor has another shape, or is missing
/// without a value in its place.
fn compare(
    context: &Context,
    folder: &Folder,
    import: &Import<'_>,
) -> Result<ImportFound, Problem> {
    let tensors: BTreeMap<&str, &[u64]> = folder.tensors().collect();
    let mut used = BTreeSet::new();
    let mut missing = BTreeSet::new();
    let mut reshaped = Vec::new();
    let mut required = Vec::new();
    for param in context.plan.spec().tensors() {
        let name = (import.names)(&param.name);
        let shape: Vec<u64> = param.shape.iter().map(|size| *size as u64).collect();
        match tensors.get(&*name) {
            None if import.init.is_some() => {
                missing.insert(param.name.clone());
            }
            None => required.push(format!("`{name}` is missing")),
            Some(found) if *found != shape => {
                reshaped.push(format!("`{name}` has shape {found:?}, not {shape:?}"));
            }
            Some(_) => {}
        }
        used.insert(name);
    }
    let left_over = tensors.into_keys().filter(|name| !used.contains(*name));
    let left_over: Vec<String> = left_over.map(str::to_owned).collect();
    if reshaped.is_empty() && required.is_empty() {
        return Ok(ImportFound { left_over, missing });
    }
    let others = left_over.iter().map(|name| format!("`{name}` is not in the model")).collect();
    let folder = import.folder.display();
    let wrong = differences::listed_by_kind(&[reshaped, required, others]);
    let what = format!("{folder} is of another model: {wrong}");
    Err(Problem::lasting(what))
}
