//! Models: bundled ones, and those in files (PLAN.md).

mod bundled;
mod file;

use std::collections::{HashMap, HashSet};
use std::path::Path;

use hsdp_sharding::{ModelSpec, Param};
use hsdp_simulator::{Attention, Computation, Error, Hints};

/// A model: its parameters, and what else its computation depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    pub(crate) spec: ModelSpec,
    /// By the name of the unit.
    pub(crate) attentions: HashMap<String, Attention>,
    /// The names of parameters of which rows are looked up.
    pub(crate) lookups: HashSet<String>,
}

impl Model {
    /// The bundled model of this name, or the model in the file of this name.
    ///
    /// # Errors
    /// In one line, if there is none.
    pub(crate) fn find(name: &str) -> Result<Self, String> {
        bundled::find(name).map_or_else(|| file::read(Path::new(name)), Ok)
    }

    /// Its computation.
    ///
    /// # Errors
    /// Those of [`Computation::of`].
    pub(crate) fn computation(&self) -> Result<Computation, Error> {
        let lookup = |param: &Param| self.lookups.contains(&param.name);
        let attention = |unit: &hsdp_sharding::Unit| self.attentions.get(&unit.name).copied();
        Computation::of(&self.spec, &Hints { lookup: &lookup, attention: &attention })
    }
}
