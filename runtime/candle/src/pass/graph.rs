//! Records about the graph of a pass, which candle does not show. The backward of a pass needs those
//! of evaluations, too, in whose units the loss is computed.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use candle_core::TensorId;
use hsdp::PassHandle;
use parking_lot::Mutex;

use super::recomputed::FirstRuns;
use crate::unit::PassKind;
use crate::variables::Reached;
use crate::zeros::UnitCuts;

/// Records about the graph of a pass.
#[derive(Debug)]
pub(super) struct PassGraph {
    pub(super) handle: PassHandle,
    /// Graphs of the first runs of recomputed units.
    pub(super) first_runs: FirstRuns,
    /// Inputs after which units cut the graph.
    pub(super) cuts: UnitCuts,
    /// Outputs of units.
    outputs: Mutex<HashSet<TensorId>>,
}

/// The graphs of all evaluations with a backward that are open in this process. candle numbers the
/// tensors of a process, so a loss reaches none of another rank.
static EVALUATIONS: Mutex<Vec<Weak<PassGraph>>> = Mutex::new(Vec::new());

impl PassGraph {
    /// Makes the records of a pass.
    pub(super) fn of(handle: PassHandle, kind: PassKind) -> Arc<Self> {
        let graph = Arc::new(Self {
            handle,
            first_runs: FirstRuns::default(),
            cuts: UnitCuts::default(),
            outputs: Mutex::default(),
        });
        if kind == PassKind::EvaluationWithBackward {
            EVALUATIONS.lock().push(Arc::downgrade(&graph));
        }
        graph
    }

    /// Returns the records of all open passes of evaluations with a backward.
    pub(super) fn of_evaluations() -> Vec<Arc<Self>> {
        let mut all = EVALUATIONS.lock();
        all.retain(|graph| graph.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Records the output of a unit.
    pub(super) fn note_output(&self, output: TensorId) {
        self.outputs.lock().insert(output);
    }

    /// Returns whether a backward reaches the output of a unit.
    pub(super) fn is_reached(&self, reached: &Reached) -> bool {
        self.outputs.lock().iter().any(|output| reached.has(*output))
    }
}
