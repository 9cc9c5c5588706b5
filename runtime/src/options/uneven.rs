//! Runs in which some ranks have more data than others. PROTOCOL.md, "A step".

pub use hsdp_sharding::step::{Input, Supply, Uneven};

use crate::error::Error;
use crate::options::objective::Objective;

/// Refuses a policy that the objective does not allow.
pub(crate) fn check(policy: Uneven, objective: Objective) -> Result<(), Error> {
    match (policy, objective) {
        (Uneven::ZeroWeight, Objective::RankMean) => Err(Error::Options {
            what: "Uneven::ZeroWeight with the objective RankMean: a rank without data has no mean; use \
                   WeightedMean, Sum or Factor"
                .to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Whether a rank asks that the run end although it has data, after a SIGTERM for example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// The rank does not ask.
    #[default]
    NotAsked,
    /// The rank asks that the step that begins be the last.
    Asked,
}

/// The end of a run, where the next step would begin. The same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndOfRun {
    /// The number of the step that does not take place.
    pub step: u64,
    /// The ranks that still have data, which is not used, and the ranks that have none.
    pub supply: Supply,
}
