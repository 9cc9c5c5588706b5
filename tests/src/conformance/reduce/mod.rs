//! Kind `reduce`: the reduction engine, with gradients that come from a file.

mod read;
mod run;

use std::collections::BTreeMap;

use hsdp::{Accumulation, DType, Mesh, Rank};
use serde::Deserialize;

/// A case of kind `reduce`.
#[derive(Clone, Debug)]
pub struct ReduceCase {
    /// Its name.
    pub name: String,
    /// The mesh.
    pub mesh: Mesh,
    /// The parameters of each unit; a parameter's full name is `{unit}.{name}`.
    pub units: Vec<Vec<CaseParam>>,
    /// How many microbatches the step has.
    pub microbatches: usize,
    /// When they are communicated.
    pub accumulation: Accumulation,
    /// The dtype in which gradients are handed in.
    pub param_dtype: DType,
    /// The dtype in which they travel.
    pub reduce_dtype: DType,
    /// The divisor of the sum over ranks, if it is not their number.
    pub divide_factor: Option<f64>,
    /// Whether results must be equal bit for bit.
    pub exact: bool,
    /// `microbatch{m}.rank{r}.{unit}.{param}`, row-major; absent where there is no gradient.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// `{unit}.{param}` of every trainable parameter.
    pub expected: BTreeMap<String, Vec<f32>>,
}

/// A parameter of a [`ReduceCase`].
#[derive(Clone, Debug, Deserialize)]
pub struct CaseParam {
    /// Its name within the unit.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether it is reduced.
    #[serde(default = "yes")]
    pub trainable: bool,
    /// The microbatches in which it has a gradient; all, if not given.
    pub used_in: Option<Vec<usize>>,
}

fn yes() -> bool {
    true
}

impl CaseParam {
    /// Whether it has a gradient in `microbatch`.
    #[must_use]
    pub fn has_gradient(&self, microbatch: usize) -> bool {
        self.trainable && self.used_in.as_ref().is_none_or(|used| used.contains(&microbatch))
    }
}

impl ReduceCase {
    /// The name under which the gradients of a rank in a microbatch are kept.
    #[must_use]
    pub fn gradient_name(microbatch: usize, rank: Rank, parameter: &str) -> String {
        format!("microbatch{microbatch}.rank{rank}.{parameter}")
    }

    /// Its parameters with their full names.
    pub fn parameters(&self) -> impl Iterator<Item = (String, &CaseParam)> {
        self.units.iter().enumerate().flat_map(|(unit, params)| {
            params.iter().map(move |param| (format!("{unit}.{}", param.name), param))
        })
    }

    /// The divisor of the sum over ranks.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a world has few ranks")]
    pub fn divisor(&self) -> f64 {
        self.divide_factor.unwrap_or(self.mesh.world_size() as f64)
    }

    /// How far each element of a parameter may be off.
    #[expect(clippy::cast_precision_loss, reason = "a case has few ranks and microbatches")]
    fn bounds(&self, name: &str, param: &CaseParam, len: usize) -> Vec<f64> {
        let mut magnitudes = vec![0.0; len];
        for microbatch in
            (0..self.microbatches).filter(|microbatch| param.has_gradient(*microbatch))
        {
            for rank in self.mesh.ranks() {
                let gradient = &self.gradients[&Self::gradient_name(microbatch, rank, name)];
                for (magnitude, value) in magnitudes.iter_mut().zip(gradient) {
                    *magnitude += f64::from(value.abs());
                }
            }
        }
        let (relative, absolute) = match self.reduce_dtype {
            DType::BF16 => (2f64.powi(-7), 0.0),
            DType::F16 => {
                (2f64.powi(-10), 2e-7 * self.microbatches as f64 * self.mesh.world_size() as f64)
            }
            _ => (1e-6, 0.0),
        };
        let divisor = self.divisor();
        magnitudes.iter().map(|magnitude| (relative * magnitude + absolute) / divisor).collect()
    }
}
