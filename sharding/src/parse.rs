//! Reads values from text: meshes, dtypes, and options by their names.

use std::str::FromStr;

use crate::{Accumulation, DType, Error, FullCopies, Mesh, Offload, StateOver};

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

impl FromStr for StateOver {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|state| state.name() == text);
        found.ok_or_else(|| unparsable("division of optimizer state", text, "shards or world"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_reads_what_it_writes() {
        for mode in Accumulation::ALL {
            assert_eq!(mode.to_string().parse::<Accumulation>(), Ok(mode));
        }
        for copies in FullCopies::ALL {
            assert_eq!(copies.to_string().parse::<FullCopies>(), Ok(copies));
        }
        for state in StateOver::ALL {
            assert_eq!(state.to_string().parse::<StateOver>(), Ok(state));
        }
        let error = "never".parse::<Accumulation>().unwrap_err().to_string();
        let expected =
            "`never` is not a valid accumulation mode: expected reduce-scatter, every or local";
        assert_eq!(error, expected);
    }

    #[test]
    fn training_has_three_dtypes() {
        let of_training = |dtype: &DType| DType::of_training(dtype.name()).is_ok();
        let all: Vec<DType> = DType::ALL.into_iter().filter(of_training).collect();
        assert_eq!(all, [DType::F32, DType::F16, DType::BF16]);
        let error = DType::of_training("i32").unwrap_err().to_string();
        let expected =
            "`i32` is not a valid dtype of parameters and gradients: expected f32, bf16 or f16";
        assert_eq!(error, expected);
    }

    #[test]
    fn a_mesh_reads_what_it_writes() {
        let mesh: Mesh = "2x16".parse().unwrap();
        assert_eq!((mesh.replicate_size(), mesh.shard_size()), (2, 16));
        assert_eq!(mesh.to_string(), "2x16");
        for text in ["", "4", "2x", "x2", "2x3x4", "2 x 3", "-1x2", "2*3"] {
            let error = text.parse::<Mesh>().unwrap_err().to_string();
            let expected =
                format!("`{text}` is not a valid mesh: expected REPLICATExSHARD, such as 2x3");
            assert_eq!(error, expected);
        }
    }
}
