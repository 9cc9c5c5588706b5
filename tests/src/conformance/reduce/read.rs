//! Reading a case from its folder.

use std::collections::BTreeMap;
use std::path::Path;

use hsdp::{Accumulation, Placement};
use serde::Deserialize;

use super::{CaseParam, ReduceCase};
use crate::conformance::CaseError;
use crate::conformance::case::{check_memory, check_microbatches, mesh, read_json, real_dtype};
use crate::conformance::tensors::TensorFile;

/// The most units of a model.
const MAX_UNITS: usize = 10_000;

/// `case.json`.
#[derive(Deserialize)]
struct Described {
    name: String,
    mesh: [usize; 2],
    units: Vec<Vec<CaseParam>>,
    microbatches: usize,
    accumulation: String,
    param_dtype: String,
    reduce_dtype: String,
    divide_factor: Option<f64>,
    #[serde(default)]
    exact: bool,
}

impl ReduceCase {
    /// Reads the case in the folder `dir`.
    ///
    /// # Errors
    /// [`CaseError`], as [`Case::read`](crate::conformance::Case::read) says.
    pub fn read(dir: &Path) -> Result<Self, CaseError> {
        let path = dir.join("case.json");
        let described: Described = read_json(&path)?;
        let mut case = described.understood().map_err(|what| CaseError::senseless(path, what))?;
        let mut gradients = TensorFile::read(&dir.join("gradients.safetensors"))?;
        let mut expected = TensorFile::read(&dir.join("expected.safetensors"))?;
        let parameters: Vec<(String, CaseParam)> =
            case.parameters().map(|(name, param)| (name, param.clone())).collect();
        for (name, param) in parameters.into_iter().filter(|(_, param)| param.trainable) {
            for microbatch in (0..case.microbatches).filter(|at| param.has_gradient(*at)) {
                for rank in case.mesh.ranks() {
                    let key = Self::gradient_name(microbatch, rank, &name);
                    let values = gradients.take(&key, &param.shape)?;
                    case.gradients.insert(key, values);
                }
            }
            let values = expected.take(&name, &param.shape)?;
            case.expected.insert(name, values);
        }
        Ok(case)
    }
}

impl Described {
    fn understood(self) -> Result<ReduceCase, String> {
        check_microbatches(self.microbatches)?;
        self.check_units()?;
        let case = ReduceCase {
            mesh: mesh(self.mesh)?,
            accumulation: accumulation(&self.accumulation)?,
            param_dtype: real_dtype("param_dtype", &self.param_dtype)?,
            reduce_dtype: real_dtype("reduce_dtype", &self.reduce_dtype)?,
            name: self.name,
            units: self.units,
            microbatches: self.microbatches,
            divide_factor: self.divide_factor,
            exact: self.exact,
            gradients: BTreeMap::new(),
            expected: BTreeMap::new(),
        };
        check_memory(case.spec(), &case.options(Placement::Host), &[])?;
        Ok(case)
    }

    fn check_units(&self) -> Result<(), String> {
        let units = self.units.len();
        let microbatches = self.microbatches;
        if units > MAX_UNITS {
            return Err(format!("units has {units} units: the most is {MAX_UNITS}"));
        }
        let used_in = self.units.iter().flatten().filter_map(|param| param.used_in.as_ref());
        match used_in.map(Vec::len).max() {
            Some(most) if most > microbatches => {
                Err(format!("used_in has {most} microbatches, the case has {microbatches}"))
            }
            _ => Ok(()),
        }
    }
}

fn accumulation(text: &str) -> Result<Accumulation, String> {
    match text {
        "every" => Ok(Accumulation::Every),
        "reduce_scatter" => Ok(Accumulation::ReduceScatter),
        "local" => Ok(Accumulation::Local),
        _ => Err(format!("accumulation `{text}`: expected every, reduce_scatter or local")),
    }
}
