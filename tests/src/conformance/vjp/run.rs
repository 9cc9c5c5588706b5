//! Running a case: forward and backward on every rank, then the comparison.

use hsdp::{Mesh, World};
use hsdp_comm::{Channel, Tag};
use serde::{Deserialize, Serialize};

use super::VjpCase;
use super::contributions::Contributions;
use crate::conformance::Verdict;
use crate::conformance::compare::Tally;
use crate::conformance::ranks::{Carrier, on_ranks};

/// How far an element may be off, in parts of the sum of its absolute contributions.
const BOUND: f64 = 1e-12;

/// The results of one rank after the backward.
#[derive(Serialize, Deserialize)]
struct Differentiated {
    output: Option<Vec<f64>>,
    gradient: Vec<f64>,
}

impl VjpCase {
    /// Runs it, with a thread for each rank.
    #[must_use]
    pub fn run(&self) -> Verdict {
        self.run_by(Carrier::Local)
    }

    /// Runs it on ranks whose collectives are carried so.
    #[must_use]
    pub fn run_by(&self, carrier: Carrier) -> Verdict {
        self.try_run(carrier).unwrap_or_else(Verdict::Failed)
    }

    fn try_run(&self, carrier: Carrier) -> Result<Verdict, String> {
        let mesh = Mesh::new(1, self.world_size()).map_err(|error| error.to_string())?;
        let results = on_ranks(mesh, carrier, |world| self.run_rank(&world))?;
        let contributions = Contributions::of(self);
        let mut tally = Tally::default();
        for (rank, result) in results.iter().enumerate() {
            match (&result.output, &self.expected.outputs[rank]) {
                (Some(output), Some(expected)) => {
                    let of = &contributions.outputs[rank];
                    compare(&mut tally, "output", rank, output, expected, of)?;
                }
                (None, None) => {}
                (Some(output), _) => {
                    let len = output.len();
                    return Err(format!("rank {rank}: output of {len} elements, expected none"));
                }
                (None, _) => return Err(format!("rank {rank}: no output, expected one")),
            }
            let expected = &self.expected.gradients[rank];
            let of = &contributions.gradients[rank];
            compare(&mut tally, "gradient", rank, &result.gradient, expected, of)?;
        }
        Ok(tally.verdict())
    }

    fn run_rank(&self, world: &World) -> Result<Differentiated, hsdp::Error> {
        let rank = world.rank().index();
        let group = world.world_group(Channel::User);
        let input = self.inputs[rank].clone();
        let (output, backward) = self.collective.forward(&group, Tag::default(), input)?;
        let gradient = backward.gradient(self.cotangents[rank].clone())?;
        Ok(Differentiated { output, gradient })
    }
}

/// Compares the results of `rank` with the expected ones, within a bound from their contributions.
fn compare(
    tally: &mut Tally,
    what: &str,
    rank: usize,
    got: &[f64],
    expected: &[f64],
    contributions: &[f64],
) -> Result<(), String> {
    if got.len() != expected.len() {
        let [got, expected] = [got.len(), expected.len()];
        return Err(format!("rank {rank}: {what} of {got} elements, expected {expected}"));
    }
    for (index, ((&got, &expected), contribution)) in
        got.iter().zip(expected).zip(contributions).enumerate()
    {
        let place = || format!("rank {rank}, {what}[{index}]");
        tally.within(got, expected, BOUND * contribution, place);
    }
    Ok(())
}
