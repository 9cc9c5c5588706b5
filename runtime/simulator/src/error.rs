//! Errors of schedules, machines and simulations.

use hsdp_sharding::Mesh;

use crate::bundled;

/// The reason why a schedule, a machine or a simulation was refused. Every variant is a mistake of
/// the input.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model, the mesh or the options cannot be planned.
    #[error(transparent)]
    Plan(#[from] hsdp_sharding::Error),
    /// The order of a step waits for an operation that it has not issued.
    #[error("the order of the step waits for an operation that it has not issued")]
    Stuck,
    /// A machine file cannot be read.
    #[error("machine file, {place}: {problem}")]
    MachineFile {
        /// The line and the key.
        place: String,
        /// The problem, in one line.
        problem: String,
    },
    /// No machine of that name is bundled.
    #[error("no bundled machine is called {name:?}: expected {}", bundled::NAMES.join(", "))]
    UnknownMachine {
        /// The name, as given.
        name: String,
    },
    /// A number of a machine cannot have a value.
    #[error("{name}: {problem}")]
    MachineNumber {
        /// The key of the number: `links.machine.latency`.
        name: String,
        /// The problem.
        problem: String,
    },
    /// A mesh has more ranks than a machine without a network has cards.
    #[error(
        "machine {machine} has {cards} cards and no network: it cannot hold the {ranks} ranks of mesh {mesh}"
    )]
    TooManyRanks {
        /// Name of the machine.
        machine: String,
        /// Its cards.
        cards: usize,
        /// Ranks of the mesh.
        ranks: usize,
        /// The mesh.
        mesh: Mesh,
    },
    /// The time of a model's computation cannot be predicted.
    #[error("{problem}")]
    Computation {
        /// The problem, with all numbers.
        problem: String,
    },
    /// A table of measurements cannot be read.
    #[error("table, line {line}: {problem}")]
    Table {
        /// The line, from 1.
        line: u64,
        /// The problem, in one line.
        problem: String,
    },
    /// The numbers of a machine cannot be fitted to measurements.
    #[error("fit: {problem}")]
    Fit {
        /// The problem, with all numbers.
        problem: String,
    },
    /// Measured steps would take too long to predict, or to fit numbers to.
    #[error("{problem}")]
    TooLarge {
        /// The problem, with all numbers.
        problem: String,
    },
    /// A step takes the longest time or longer.
    #[error("the step takes 213 days or longer: it is not simulated")]
    TooLong,
    /// A step of so many tokens cannot be divided among ranks.
    #[error(
        "a step of {tokens} tokens is no multiple of {context} tokens of a sequence on each of {ranks} ranks"
    )]
    BatchTokens {
        /// Tokens of the step.
        tokens: u64,
        /// Ranks.
        ranks: usize,
        /// Tokens of a sequence.
        context: usize,
    },
    /// A search has too many candidates, or plans or simulations that take too long.
    #[error("{problem}")]
    SearchTooLarge {
        /// The problem, with all numbers.
        problem: String,
    },
    /// Schedules cannot be judged.
    #[error("{}", at(.place, .problem))]
    Schedules {
        /// The place in their JSON, such as `schedules[0][3]`; empty if it has none.
        place: String,
        /// The problem, with all numbers.
        problem: String,
    },
    /// Flight records do not show enough of a world, or are not of one world.
    #[error("{problem}")]
    Records {
        /// The problem, with all numbers.
        problem: String,
    },
}

/// Puts the place before the problem, unless it is unknown: empty, a point or a question mark.
fn at(place: &str, problem: &str) -> String {
    match place {
        "" | "." | "?" => problem.to_owned(),
        place => format!("{place}: {problem}"),
    }
}
