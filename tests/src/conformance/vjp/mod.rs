//! Kind `vjp`: one differentiable collective, forward and backward, in f64.

mod contributions;
mod read;
mod run;

use hsdp::collective::Collective;

/// A case of kind `vjp`.
#[derive(Clone, Debug)]
pub struct VjpCase {
    name: String,
    /// The operation that every rank applies. The copies of its output are `Replicate`: each rank
    /// has a loss of its own.
    collective: Collective,
    /// Of each rank, equally many elements.
    inputs: Vec<Vec<f64>>,
    /// Of each rank's output; `None` where it has none.
    cotangents: Vec<Option<Vec<f64>>>,
    expected: Expected,
}

/// The results of one process that had the inputs of all ranks.
#[derive(Clone, Debug)]
struct Expected {
    /// Of each rank; `None` where it has none.
    outputs: Vec<Option<Vec<f64>>>,
    /// Of each rank's input.
    gradients: Vec<Vec<f64>>,
}

impl VjpCase {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many ranks it needs.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.inputs.len()
    }

    /// How many elements `rank` gets, if it has an output.
    fn output_len(&self, rank: usize) -> Option<usize> {
        let len = self.inputs[rank].len();
        let size = self.world_size();
        match self.collective {
            Collective::Reduce { root, .. } => (rank == root).then_some(len),
            Collective::Gather { root } => (rank == root).then_some(len * size),
            Collective::AllGather { .. } => Some(len * size),
            Collective::ReduceScatter { .. } | Collective::Scatter { .. } => Some(len / size),
            _ => Some(len),
        }
    }
}
