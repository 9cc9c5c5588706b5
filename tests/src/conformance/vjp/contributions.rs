//! The contributions to each element of a case, in absolute values: the measure of its bound.
//!
//! The same sums as in the case, in one process, of absolute values. Elements that only travel are
//! the one contribution to themselves.

use hsdp::collective::{Collective, Reducer};

use super::VjpCase;

/// Sums of the absolute contributions, of each rank's elements.
pub(super) struct Contributions {
    /// Of the outputs; empty where a rank has none.
    pub(super) outputs: Vec<Vec<f64>>,
    /// Of the gradients.
    pub(super) gradients: Vec<Vec<f64>>,
}

impl Contributions {
    pub(super) fn of(case: &VjpCase) -> Self {
        let ranks = 0..case.world_size();
        let outputs = ranks.clone().map(|rank| case.to_output(rank)).collect();
        let gradients = ranks.map(|rank| case.to_gradient(rank)).collect();
        Self { outputs, gradients }
    }
}

impl VjpCase {
    fn to_output(&self, rank: usize) -> Vec<f64> {
        let len = self.inputs[rank].len();
        let part = len / self.world_size();
        let everybodys = || absolute(&self.inputs.concat());
        match &self.collective {
            Collective::AllReduce { reducer, .. } => self.to_reduced(*reducer),
            Collective::Reduce { root, reducer } if rank == *root => self.to_reduced(*reducer),
            Collective::ReduceScatter { reducer } => {
                self.to_reduced(*reducer)[rank * part..][..part].to_vec()
            }
            Collective::AllGather { .. } => everybodys(),
            Collective::Gather { root } if rank == *root => everybodys(),
            Collective::Broadcast { root, .. } => absolute(&self.inputs[*root]),
            Collective::Scatter { root } => absolute(&self.inputs[*root][rank * part..][..part]),
            Collective::AllToAll { .. } => exchanged(&self.inputs, rank),
            Collective::Permute { destinations } => {
                let source = destinations.iter().position(|to| *to == Some(rank));
                source.map_or_else(|| vec![0.0; len], |source| absolute(&self.inputs[source]))
            }
            _ => Vec::new(),
        }
    }

    fn to_gradient(&self, rank: usize) -> Vec<f64> {
        let len = self.inputs[rank].len();
        let all: Vec<Vec<f64>> =
            self.cotangents.iter().map(|cotangent| cotangent.clone().unwrap_or_default()).collect();
        let sums = || sums(&all.iter().map(|one| absolute(one)).collect::<Vec<_>>());
        match &self.collective {
            Collective::AllReduce { reducer, .. } => self.shared(*reducer, rank, &sums()),
            Collective::Reduce { root, reducer } => {
                self.shared(*reducer, rank, &absolute(&all[*root]))
            }
            Collective::ReduceScatter { reducer } => {
                self.shared(*reducer, rank, &absolute(&all.concat()))
            }
            Collective::AllGather { .. } => sums()[rank * len..][..len].to_vec(),
            Collective::Gather { root } => absolute(&all[*root][rank * len..][..len]),
            Collective::Broadcast { root, .. } if rank == *root => sums(),
            Collective::Scatter { root } if rank == *root => absolute(&all.concat()),
            Collective::AllToAll { .. } => exchanged(&all, rank),
            Collective::Permute { destinations } => {
                destinations[rank].map_or_else(|| vec![0.0; len], |to| absolute(&all[to]))
            }
            _ => vec![0.0; len],
        }
    }

    /// To each element of the reduction of all inputs.
    fn to_reduced(&self, reducer: Reducer) -> Vec<f64> {
        (0..self.inputs[0].len())
            .map(|element| {
                let column = self.column(element);
                let sizes = column.iter().map(|value| value.abs());
                match reducer {
                    Reducer::Product => sizes.product(),
                    Reducer::Min | Reducer::Max => extreme(reducer, &column).abs(),
                    _ => sizes.sum::<f64>() / self.divisor(reducer),
                }
            })
            .collect()
    }

    /// Returns the share of a rank's elements in the cotangents of the whole reduction.
    fn shared(&self, reducer: Reducer, rank: usize, whole: &[f64]) -> Vec<f64> {
        let share = |(element, cotangent): (usize, &f64)| {
            let column = self.column(element);
            cotangent
                * match reducer {
                    Reducer::Product => product_of_others(&column, rank).abs(),
                    Reducer::Min | Reducer::Max => share_of_extreme(reducer, &column, rank),
                    _ => 1.0 / self.divisor(reducer),
                }
        };
        whole.iter().enumerate().map(share).collect()
    }

    /// What all ranks have of one element.
    fn column(&self, element: usize) -> Vec<f64> {
        self.inputs.iter().map(|input| input[element]).collect()
    }

    #[expect(clippy::cast_precision_loss, reason = "a world has few ranks")]
    fn divisor(&self, reducer: Reducer) -> f64 {
        if reducer == Reducer::Avg { self.world_size() as f64 } else { 1.0 }
    }
}

fn absolute(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value.abs()).collect()
}

fn sums(all: &[Vec<f64>]) -> Vec<f64> {
    (0..all[0].len()).map(|element| all.iter().map(|one| one[element]).sum()).collect()
}

/// The chunks that all ranks have for `rank`.
fn exchanged(all: &[Vec<f64>], rank: usize) -> Vec<f64> {
    let part = all[0].len() / all.len();
    absolute(&all.iter().flat_map(|one| one[rank * part..][..part].to_vec()).collect::<Vec<_>>())
}

fn extreme(reducer: Reducer, column: &[f64]) -> f64 {
    let pick = if reducer == Reducer::Min { f64::min } else { f64::max };
    column.iter().copied().reduce(pick).unwrap_or(0.0)
}

fn product_of_others(column: &[f64], rank: usize) -> f64 {
    let others = column.iter().enumerate().filter(|(other, _)| *other != rank);
    others.map(|(_, value)| value).product()
}

#[expect(clippy::cast_precision_loss, reason = "a world has few ranks")]
fn share_of_extreme(reducer: Reducer, column: &[f64], rank: usize) -> f64 {
    let extreme = extreme(reducer, column);
    let holders = column.iter().filter(|value| **value == extreme).count();
    if column[rank] == extreme { 1.0 / holders as f64 } else { 0.0 }
}
