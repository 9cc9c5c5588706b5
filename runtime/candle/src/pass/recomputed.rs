//! The first run of a recomputed unit, in the forward.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, TensorId};
use hsdp::{BufferId, ModelSpec, ParamId};
use hsdp_sharding::Role;
use parking_lot::Mutex;

use super::Pass;
use super::reader::PassReader;
use crate::convert::cast_inputs;
use crate::error::{Error, LostGradients};
use crate::model::{ForwardMode, Parameters, RepeatableForward};
use crate::recompute::{
    RecomputeOp, RecomputedInput, RecomputedOutput, RecomputedRead, input_leaf, is_differentiated,
};
use crate::statistics::{BatchStatistics, StatisticsRecord};
use crate::storage::{move_back, move_to_variable};
use crate::unit::{LiveUnit, PassKind, UnitUsage};
use crate::variables::Reached;

impl Pass<'_> {
    pub(super) fn run_first(
        &self,
        name: &str,
        inputs: &[Tensor],
        forward: RepeatableForward,
    ) -> Result<Tensor, Error> {
        let own = self.find(name)?;
        let forward = self.with_casts(own, forward);
        let contiguous = inputs.iter().map(Tensor::contiguous); // as the second run has them
        let inputs = contiguous.collect::<candle_core::Result<Vec<_>>>()?;
        let usage = UnitUsage::of(own);
        own.gather()?;
        let reader = PassReader { pass: self, own, usage: &usage };
        let first = FirstRun {
            reader,
            reads: Mutex::default(),
            leaves: Mutex::default(),
            buffers: Mutex::default(),
            statistics: Arc::default(),
        };
        let output = self.first_output(&first, &inputs, forward);
        let ended = first.end();
        let output = output?;
        ended?;
        usage.reshard()?;
        Ok(output)
    }

    fn first_output(
        &self,
        first: &FirstRun<'_, '_>,
        inputs: &[Tensor],
        forward: RepeatableForward,
    ) -> Result<Tensor, Error> {
        let PassReader { own, usage, .. } = first.reader;
        // Variables, so that a tensor which leaves the forward beside its output is noticed.
        let leaves = inputs.iter().map(input_leaf).collect::<candle_core::Result<Vec<_>>>()?;
        let output = forward(first, &leaves);
        let mut own_leaves: HashSet<_> = leaves.iter().map(Tensor::id).collect();
        own_leaves.extend(first.leaves.lock().iter().map(|it| it.leaf.id()));
        self.graph.first_runs.note_leaves(own.name(), &own_leaves);
        let output = output?;
        let mut reached = Reached::from(&output);
        self.graph.first_runs.note_rounding(reached.rounds_to);
        reached.programs.retain(|variable| !own_leaves.contains(&variable.id()));
        self.graph.first_runs.check(&reached, &format_args!("recomputed unit {}", own.name()))?;
        if let Some(what) = reached.described() {
            return Err(Error::LostGradients(LostGradients::History {
                unit: own.name().to_owned(),
                what,
            }));
        }
        let reads = std::mem::take(&mut *first.reads.lock());
        let parents: Vec<bool> = leaves.iter().map(|leaf| reached.has(leaf.id())).collect();
        if !parents.contains(&true) && !reads.iter().any(RecomputedRead::is_trainable) {
            return Ok(output.detach().copy()?);
        }
        let statistics = std::mem::take(&mut *first.statistics.lock());
        await_gradients(usage, &reads);
        statistics.iter().for_each(|sums| sums.await_backward());
        let of_op = inputs.iter().zip(&parents).map(|(input, is_parent)| match is_parent {
            true => RecomputedInput::from(input.clone()),
            false => RecomputedInput::from(input.detach()),
        });
        let of_op: Vec<_> = of_op.collect();
        let mut chain = match self.kind {
            PassKind::Training => self.anchor.as_tensor().clone(),
            // No parameter of the unit is trained.
            PassKind::Evaluation | PassKind::EvaluationWithBackward => self.anchor.detach(),
        };
        for input in of_op.iter().filter(|input| is_differentiated(&input.tensor)) {
            chain = chain.apply_op2(input.in_graph(), input.op.clone())?;
        }
        let output = output.detach();
        let op = RecomputeOp {
            own: Arc::clone(own),
            forward,
            usage: Arc::clone(usage),
            inputs: of_op,
            reads,
            buffers: std::mem::take(&mut *first.buffers.lock()),
            statistics,
            output: RecomputedOutput::of(&output),
        };
        let output = op.apply(&chain, &output)?;
        self.note_output(own, inputs, &parents, &output);
        Ok(output)
    }
}

impl Pass<'_> {
    /// Adds the casts of the inputs to the forward of a unit, if the pass casts inputs. Both runs
    /// of a recomputed unit cast, so the graph between the units keeps no second copy of an input.
    fn with_casts(&self, own: &LiveUnit, forward: RepeatableForward) -> RepeatableForward {
        if !self.casts_inputs {
            return forward;
        }
        let dtype = own.dtype();
        Arc::new(move |parameters, inputs| forward(parameters, &cast_inputs(inputs, dtype)?))
    }
}

/// Makes the units wait for the backward of this use: for gradients of trainable parameters, and
/// for a release of frozen ones.
fn await_gradients(usage: &UnitUsage, reads: &[RecomputedRead]) {
    for RecomputedRead { unit, index } in reads {
        match unit.role(*index) {
            Role::Frozen => usage.reads_frozen(unit),
            Role::Trainable => unit.awaits_piece(),
        }
    }
}

/// Provides the first run with its parameters, and records which it reads, with the buffers and the
/// sums of statistics that it sees. As in the second run, each trainable parameter is a variable
/// that holds its storage during the run.
struct FirstRun<'a, 'step> {
    reader: PassReader<'a, 'step>,
    reads: Mutex<Vec<RecomputedRead>>,
    leaves: Mutex<Vec<Leaf>>,
    /// Buffers as the run has read them, in the order of its reads.
    buffers: Mutex<Vec<(BufferId, Tensor)>>,
    statistics: Arc<StatisticsRecord>,
}

/// A trainable parameter in a first run.
struct Leaf {
    id: ParamId,
    leaf: Tensor,
    /// Tensor that gets the storage back.
    tensor: Tensor,
}

impl FirstRun<'_, '_> {
    fn read(&self, name: &str) -> Result<Tensor, Error> {
        let (unit, id) = self.reader.gathered(name)?;
        let mut leaves = self.leaves.lock();
        if let Some(known) = leaves.iter().find(|it| it.id == id) {
            return Ok(known.leaf.clone());
        }
        let tensor = self.reader.tensor(unit, id)?.detach();
        let mut reads = self.reads.lock();
        if !reads.iter().any(|read| read.is(id)) {
            reads.push(RecomputedRead { unit: Arc::clone(unit), index: id.index });
        }
        if unit.role(id.index) == Role::Frozen {
            return Ok(tensor);
        }
        let leaf = move_to_variable(&tensor)?;
        leaves.push(Leaf { id, leaf: leaf.clone(), tensor });
        Ok(leaf)
    }

    /// Returns the storages to their tensors.
    fn end(&self) -> candle_core::Result<()> {
        self.leaves.lock().drain(..).try_for_each(|it| move_back(&it.leaf, &it.tensor))
    }
}

/// Graphs of the first runs of a pass, which are not part of the graph of the loss.
#[derive(Debug, Default)]
pub(super) struct FirstRuns {
    /// Variables, with the names of their units. Their gradients are lost.
    leaves: Mutex<HashMap<TensorId, String>>,
    /// A 16-bit dtype of a tensor of a run, which rounds gradients.
    rounds_to: Mutex<Option<DType>>,
}

impl FirstRuns {
    fn note_leaves(&self, unit: &str, leaves: &HashSet<TensorId>) {
        self.leaves.lock().extend(leaves.iter().map(|leaf| (*leaf, unit.to_owned())));
    }

    fn note_rounding(&self, dtype: Option<DType>) {
        let mut known = self.rounds_to.lock();
        *known = known.or(dtype);
    }

    /// Returns a 16-bit dtype that tensors of a run have, if there is one.
    pub(super) fn rounds_to(&self) -> Option<DType> {
        *self.rounds_to.lock()
    }

    /// Refuses tensors that depend on a tensor that left a recomputed unit beside its output.
    ///
    /// # Errors
    /// [`LostGradients::BesideOutput`](crate::LostGradients::BesideOutput).
    pub(super) fn check(&self, reached: &Reached, what: &dyn fmt::Display) -> Result<(), Error> {
        let leaves = self.leaves.lock();
        match reached.programs.iter().find_map(|variable| leaves.get(&variable.id())) {
            None => Ok(()),
            Some(unit) => Err(Error::LostGradients(LostGradients::BesideOutput {
                unit: unit.clone(),
                what: what.to_string(),
            })),
        }
    }
}

impl Parameters for FirstRun<'_, '_> {
    fn get(&self, name: &str) -> candle_core::Result<Tensor> {
        Ok(self.read(name)?)
    }

    fn buffer(&self, name: &str) -> candle_core::Result<Tensor> {
        let id = self.reader.found(name)?;
        let buffer = self.reader.buffered(id)?;
        self.buffers.lock().push((id, buffer.clone()));
        Ok(buffer)
    }

    fn write_buffer(&self, name: &str, value: &Tensor) -> candle_core::Result<()> {
        self.reader.write_buffer(name, value)
    }

    fn mode(&self) -> candle_core::Result<ForwardMode> {
        self.reader.mode()
    }

    fn statistics(&self, name: &str) -> Option<BatchStatistics> {
        let (unit, index) = self.reader.statistics_of(name)?;
        Some(BatchStatistics::first(Arc::clone(unit), index, Arc::clone(&self.statistics)))
    }

    fn spec(&self) -> &ModelSpec {
        self.reader.spec()
    }

    fn dtype(&self) -> DType {
        self.reader.dtype()
    }

    fn device(&self) -> &Device {
        self.reader.device()
    }
}
