//! Reads values from text: meshes, dtypes, and options by their names.

use std::str::FromStr;

use crate::{Accumulation, DType, Error, FullCopies, Mesh, Offload};

#[cfg(test)]
mod tests;

impl FromStr for Mesh {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let sizes = text
            .split_once('x')
            .and_then(|(replicate, shard)| Some((replicate.parse().ok()?, shard.parse().ok()?)));
        let (replicate, shard) =
            sizes.ok_or_else(|| unparsable("mesh", text, "REPLICATExSHARD, such as 2x3"))?;
        Self::new(replicate, shard)
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == text);
        found.ok_or_else(|| unparsable("dtype", text, "f32, f16, bf16, f64, i32, i64, u32 or u64"))
    }
}

impl DType {
    /// Reads the name of a dtype that parameters and gradients in training can have: `f32`, `bf16`
    /// or `f16`.
    ///
    /// # Errors
    /// [`Error::Unparsable`]
    pub fn of_training(text: &str) -> Result<Self, Error> {
        let mut all = Self::ALL.into_iter().filter(|dtype| dtype.is_of_training());
        all.find(|dtype| dtype.name() == text).ok_or_else(|| {
            unparsable("dtype of parameters and gradients", text, "f32, bf16 or f16")
        })
    }
}

impl FromStr for Accumulation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| unparsable("accumulation mode", text, "reduce-scatter, every or local"))
    }
}

impl FromStr for FullCopies {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|copies| copies.name() == text);
        found.ok_or_else(|| unparsable("choice of full copies", text, "per-rank or per-process"))
    }
}

impl FromStr for Offload {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::EVERY.into_iter().find(|offload| offload.name() == text);
        found.ok_or_else(|| unparsable("offload", text, "none, optimizer or all"))
    }
}

fn unparsable(what: &'static str, text: &str, expected: &'static str) -> Error {
    Error::Unparsable { what, text: text.to_owned(), expected }
}
