//! The world that the environment asks for.

use std::env::{self, VarError};

use crate::{Error, World};

const RANK: &str = "RANK";
const WORLD_SIZE: &str = "WORLD_SIZE";

impl World {
    /// The world that `RANK` and `WORLD_SIZE` describe, as launchers set them.
    ///
    /// This build serves one process: without the variables, or with `WORLD_SIZE=1`, the world is
    /// [`single`](Self::single). Everything else is refused by name.
    ///
    /// # Errors
    /// [`Error::Environment`] if a variable is not a number, `RANK` is not below `WORLD_SIZE`, one is set without
    /// the other where that matters, or `WORLD_SIZE` is above 1.
    pub fn from_env() -> Result<Self, Error> {
        let read = |variable| match env::var(variable) {
            Ok(value) => Ok(Some(value)),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(value)) => Err(refused(
                variable,
                value.to_string_lossy().into_owned(),
                "not Unicode".to_owned(),
            )),
        };
        check(read(RANK)?, read(WORLD_SIZE)?)?;
        Ok(Self::single())
    }
}

/// Whether a world of one process is what the variables ask for.
fn check(rank: Option<String>, size: Option<String>) -> Result<(), Error> {
    let rank_number = rank.as_deref().map(|value| number(RANK, value)).transpose()?;
    let size_number = size.as_deref().map(|value| number(WORLD_SIZE, value)).transpose()?;
    let size = size.unwrap_or_else(|| "1".to_owned());
    match (rank_number.unwrap_or(0), size_number.unwrap_or(1)) {
        (_, 0) => Err(refused(WORLD_SIZE, size, "a world has at least 1 rank".to_owned())),
        (rank, size) if rank >= size => {
            let problem = format!("ranks of a world of {size} are numbered from 0 to {}", size - 1);
            Err(refused(RANK, rank.to_string(), problem))
        }
        (_, 1) => Ok(()),
        _ => {
            let problem =
                "this build serves one process; its ranks are threads, as `launch` starts them";
            Err(refused(WORLD_SIZE, size, problem.to_owned()))
        }
    }
}

fn number(variable: &'static str, value: &str) -> Result<u32, Error> {
    value.trim().parse().map_err(|error| {
        refused(variable, value.to_owned(), format!("not a number of ranks: {error}"))
    })
}

fn refused(variable: &'static str, value: String, problem: String) -> Error {
    Error::Environment { variable, value, problem }
}

#[cfg(test)]
mod tests;
