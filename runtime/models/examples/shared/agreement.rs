//! The comparison of inputs between ranks, before they train.

use hsdp::{CommError, World};

use super::failure::Failure;

/// The beginning of a text that is compared, if a rank has a problem in place of inputs.
const PROBLEM: &str = "problem: ";

/// The inputs of this process in words, for the comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    /// The options that must be equal on all ranks.
    pub(crate) options: &'a str,
    /// The name of the other input.
    pub(crate) what: &'static str,
    /// Its digest, or the problem of this process.
    pub(crate) digest: Result<&'a str, &'a Failure>,
}

/// Compares options and other input between ranks, since each process has its own command line and files. Files are compared by
/// their content: their paths may differ. A rank that has a problem tells the others. Collective.
///
/// # Errors
/// One that rank 0 reports for all ranks.
pub(crate) fn agree(world: &World, inputs: Inputs<'_>) -> Result<(), Failure> {
    let said = match inputs.digest {
        Ok(digest) => digest.to_owned(),
        Err(failure) => format!("{PROBLEM}{failure}"),
    };
    let compared = world.compare("options", inputs.options);
    let compared = compared.and_then(|()| world.compare(inputs.what, &said));
    compared.map_err(|error| refused(world, error))?;
    inputs.digest.map(drop).map_err(|failure| told_once(world, failure.to_string()))
}

/// The failure of a comparison. A problem is told with its rank, not with the text of another.
fn refused(world: &World, error: CommError) -> Failure {
    let CommError::ConfigMismatch { ranks, said, .. } = &error else {
        return hsdp::Error::from(error).into();
    };
    let problem_of = |(rank, said): (&hsdp::Rank, &String)| {
        said.strip_prefix(PROBLEM).map(|problem| format!("rank {rank}: {problem}"))
    };
    let problem = ranks.iter().zip(said.iter()).find_map(problem_of);
    told_once(world, problem.unwrap_or_else(|| error.to_string()))
}

/// The failure of input that all ranks refuse, which rank 0 reports.
pub(crate) fn told_once(world: &World, what: String) -> Failure {
    match world.rank().index() {
        0 => Failure::Input(what),
        _ => Failure::Elsewhere,
    }
}
