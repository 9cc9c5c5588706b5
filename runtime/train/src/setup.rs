//! A rank before it trains.

use std::fmt::Display;

use hsdp::{CommError, ModelOptions, Rank, SetupError, World};

use crate::failure::Failure;
use crate::folder::RunFiles;
use crate::options::RunOptions;
use crate::signals::Signals;
use crate::stderr::tell;
use crate::warnings::Warnings;

/// Prefix of a compared text that reports a problem in place of inputs.
pub(crate) const PROBLEM: &str = "problem: ";

/// Everything that the ranks of a process share.
#[derive(Debug)]
pub(crate) struct ProcessShare {
    /// Name of the program.
    pub(crate) name: &'static str,
    /// Options of the run, with the device of the process.
    pub(crate) options: RunOptions,
    pub(crate) warnings: Warnings,
    pub(crate) signals: Signals,
}

/// One rank of a program, before it trains.
#[derive(Debug)]
pub struct Setup<'a> {
    pub(crate) world: World,
    pub(crate) process: &'a ProcessShare,
    /// Files of the run, on rank 0.
    pub(crate) files: Option<&'a RunFiles>,
}

impl<'a> Setup<'a> {
    /// Returns the world of this rank.
    #[must_use]
    pub fn world(&self) -> World {
        self.world.clone()
    }

    /// Returns the index of this rank.
    #[must_use]
    pub fn index(&self) -> Rank {
        self.world.rank()
    }

    /// Returns the options of the run, with the device of this process.
    #[must_use]
    pub fn options(&self) -> &'a RunOptions {
        &self.process.options
    }

    /// Returns how the model is sharded and reduced.
    #[must_use]
    pub fn model_options(&self) -> ModelOptions {
        self.process.options.model()
    }

    /// Compares a text between all ranks: the program's options, or a digest of an input that each
    /// process reads from its own files. **Collective** over the world.
    ///
    /// # Errors
    /// [`Failure::Input`] on rank 0 and [`Failure::Elsewhere`] on the others if texts differ.
    pub fn compare(&self, what: &'static str, text: &str) -> Result<(), Failure> {
        compare(&self.world, what, text)
    }

    /// Returns the failure for an input that all ranks refuse. Rank 0 reports it.
    #[must_use]
    pub fn refused(&self, problem: impl Display) -> Failure {
        refused(&self.world, problem.to_string())
    }

    /// Returns whether this is rank 0, which shows progress and writes files.
    pub(crate) fn is_first(&self) -> bool {
        self.world.rank().index() == 0
    }

    /// Prints a line about the run to stderr, on rank 0.
    pub(crate) fn tell(&self, line: impl Display) {
        if self.is_first() {
            tell(self.process.name, line);
        }
    }

    /// Returns the name of the program.
    pub(crate) fn program(&self) -> &'static str {
        self.process.name
    }

    pub(crate) fn warnings(&self) -> &'a Warnings {
        &self.process.warnings
    }

    /// Returns whether a signal has asked the run to end.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.process.signals.caught().is_some()
    }
}

pub(crate) fn compare(world: &World, what: &'static str, text: &str) -> Result<(), Failure> {
    world.compare(what, text).map_err(|error| {
        let CommError::Setup(SetupError::ConfigMismatch { ranks, said, .. }) = &error else {
            return Failure::from(error);
        };
        // A problem is reported with its rank, without the other rank's text.
        let problem_of = |(rank, said): (&Rank, &String)| {
            said.strip_prefix(PROBLEM).map(|problem| format!("rank {rank}: {problem}"))
        };
        let problem = ranks.iter().zip(said.iter()).find_map(problem_of);
        refused(world, problem.unwrap_or_else(|| error.to_string()))
    })
}

/// Returns the failure for an input that all ranks refuse. Rank 0 reports it.
pub(crate) fn refused(world: &World, problem: String) -> Failure {
    match world.rank().index() {
        0 => Failure::Input(problem),
        _ => Failure::Elsewhere,
    }
}
