//! Reading a case from its folder.

use std::path::Path;

use hsdp::collective::{Collective, Copies, Reducer};
use serde::Deserialize;

use super::{Expected, VjpCase};
use crate::conformance::CaseError;
use crate::conformance::case::read_json;

/// `case.json`.
#[derive(Deserialize)]
struct Described {
    name: String,
    op: String,
    reduce: Option<String>,
    world: usize,
    root: Option<usize>,
    destination: Option<Vec<Option<usize>>>,
    inputs: Vec<Vec<f64>>,
    cotangents: Vec<Option<Vec<f64>>>,
    expected_outputs: Vec<Option<Vec<f64>>>,
    expected_input_gradients: Vec<Vec<f64>>,
}

impl VjpCase {
    /// Reads the case in the folder `dir`.
    ///
    /// # Errors
    /// [`CaseError`], as [`Case::read`](crate::conformance::Case::read) says.
    pub fn read(dir: &Path) -> Result<Self, CaseError> {
        let path = dir.join("case.json");
        let described: Described = read_json(&path)?;
        described.understood().map_err(|what| CaseError::senseless(path, what))
    }

    /// Whether the cotangents and the expected values fit the inputs.
    fn check(&self) -> Result<(), String> {
        for rank in 0..self.world_size() {
            let [len, wanted] = [Some(self.inputs[rank].len()), self.output_len(rank)];
            let of = |list: &[Option<Vec<f64>>]| list[rank].as_ref().map(Vec::len);
            for (field, got, wanted) in [
                ("inputs", len, Some(self.inputs[0].len())),
                ("cotangents", of(&self.cotangents), wanted),
                ("expected_outputs", of(&self.expected.outputs), wanted),
                ("expected_input_gradients", Some(self.expected.gradients[rank].len()), len),
            ] {
                if got != wanted {
                    let [got, wanted] = [got, wanted].map(elements);
                    return Err(format!("{field}[{rank}] is {got}: expected {wanted}"));
                }
            }
        }
        Ok(())
    }
}

impl Described {
    fn understood(self) -> Result<VjpCase, String> {
        self.check_world()?;
        let case = VjpCase {
            collective: self.collective()?,
            name: self.name,
            inputs: self.inputs,
            cotangents: self.cotangents,
            expected: Expected {
                outputs: self.expected_outputs,
                gradients: self.expected_input_gradients,
            },
        };
        case.check()?;
        Ok(case)
    }

    fn check_world(&self) -> Result<(), String> {
        if self.world == 0 {
            return Err("world is 0: the least is 1".to_owned());
        }
        for (field, ranks) in [
            ("inputs", self.inputs.len()),
            ("cotangents", self.cotangents.len()),
            ("expected_outputs", self.expected_outputs.len()),
            ("expected_input_gradients", self.expected_input_gradients.len()),
        ] {
            if ranks != self.world {
                return Err(format!("{field} are of {ranks} ranks, the world has {}", self.world));
            }
        }
        Ok(())
    }

    fn collective(&self) -> Result<Collective, String> {
        let output = Copies::Replicate;
        Ok(match self.op.as_str() {
            "all_reduce" => Collective::AllReduce { reducer: self.reducer()?, output },
            "reduce_scatter" => {
                self.part()?;
                Collective::ReduceScatter { reducer: self.reducer()? }
            }
            "all_gather" => Collective::AllGather { output },
            "all_to_all" => {
                let counts = vec![self.part()?; self.world];
                Collective::AllToAll { send: counts.clone(), receive: counts }
            }
            "broadcast" => Collective::Broadcast { root: self.root()?, output },
            "reduce" => Collective::Reduce { root: self.root()?, reducer: self.reducer()? },
            "gather" => Collective::Gather { root: self.root()? },
            "scatter" => {
                self.part()?;
                Collective::Scatter { root: self.root()? }
            }
            "permute" => Collective::Permute { destinations: self.destinations()? },
            op => {
                return Err(format!(
                    "op `{op}`: expected all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, reduce, gather, \
                     scatter or permute"
                ));
            }
        })
    }

    fn reducer(&self) -> Result<Reducer, String> {
        match self.reduce.as_deref() {
            Some("sum") => Ok(Reducer::Sum),
            Some("avg") => Ok(Reducer::Avg),
            Some("prod") => Ok(Reducer::Product),
            Some("min") => Ok(Reducer::Min),
            Some("max") => Ok(Reducer::Max),
            other => {
                let got = other.unwrap_or("null");
                Err(format!(
                    "reduce `{got}` of op `{}`: expected sum, avg, prod, min or max",
                    self.op
                ))
            }
        }
    }

    fn root(&self) -> Result<usize, String> {
        let root = self.root.ok_or_else(|| format!("root is null: op `{}` has one", self.op))?;
        self.member("root", root)
    }

    fn member(&self, what: &str, rank: usize) -> Result<usize, String> {
        let refusal = || format!("{what} is rank {rank}, the world has {}", self.world);
        (rank < self.world).then_some(rank).ok_or_else(refusal)
    }

    fn destinations(&self) -> Result<Vec<Option<usize>>, String> {
        let missing = || "destination is null: op `permute` has one for each rank".to_owned();
        let destinations = self.destination.clone().ok_or_else(missing)?;
        if destinations.len() != self.world {
            let count = destinations.len();
            return Err(format!("destination has {count} ranks, the world has {}", self.world));
        }
        let mut senders = vec![None; self.world];
        for (from, to) in destinations.iter().enumerate() {
            let Some(to) = *to else { continue };
            let to = self.member(&format!("destination[{from}]"), to)?;
            if let Some(other) = senders[to].replace(from) {
                return Err(format!("destination: ranks {other} and {from} both send to {to}"));
            }
        }
        Ok(destinations)
    }

    /// Elements of one chunk.
    fn part(&self) -> Result<usize, String> {
        let len = self.inputs[0].len();
        let world = self.world;
        let refusal =
            || format!("inputs have {len} elements: op `{}` deals them to {world} ranks", self.op);
        len.is_multiple_of(world).then_some(len / world).ok_or_else(refusal)
    }
}

fn elements(len: Option<usize>) -> String {
    len.map_or_else(|| "null".to_owned(), |len| format!("{len} elements"))
}
