//! The first run of a recomputed unit, in the forward.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, TensorId};
use hsdp::{ModelSpec, ParamId};
use hsdp_sharding::Role;
use parking_lot::Mutex;

use super::reader::PassReader;
use super::{Pass, PassKind};
use crate::convert::cast_input;
use crate::error::{Error, LostGradients};
use crate::model::{Parameters, RepeatableForward};
use crate::recompute::{RecomputeOp, RecomputedRead, input_leaf, is_differentiated};
use crate::storage::{move_back, move_to_variable};
use crate::unit::{LiveUnit, UnitUsage};
use crate::variables::Reached;

impl Pass<'_> {
    /// Runs `forward` as [`unit`](Self::unit) does, but keeps none of the tensors that it makes,
    /// except its output. The backward gathers the unit, as it does for `unit`, and runs `forward`
    /// again for its gradients (activation checkpointing). So each such unit computes its forward
    /// twice. The collectives are those of `unit`.
    ///
    /// Only one unit at a time has its activations in memory. The second run keeps them for its
    /// backward. The first run keeps them until `forward` returns, to find tensors that leave the
    /// unit beside its output.
    ///
    /// `forward` must be repeatable: its second output must have the bits of the first. Tensors
    /// that it captures must have no gradients, which would be lost: an output that depends on a
    /// captured variable, or on a tensor computed from parameters, is an error. A loss is an error,
    /// too, if it depends on a tensor that left `forward` beside its output. Detach a tensor that
    /// is kept for a log, or it keeps the tensors of the first run. Both runs change the state that
    /// `forward` changes. An input that is a view is copied first, to be contiguous.
    ///
    /// Losses and gradients have the bits that they have with `unit`, with one exception: if candle
    /// adds more than two numbers, and the graph of the second run cuts this sum, another order may
    /// round differently. This concerns the gradient of a parameter that this unit reads more than
    /// once and another unit reads too, and the gradient of an input that is also used outside of
    /// the unit.
    ///
    /// Waits for a gather over the shard group, which all its ranks issue in the plan's order.
    ///
    /// # Errors
    /// The errors of [`unit`](Self::unit);
    /// [`LostGradients::History`](crate::LostGradients::History) if the output has a gradient for
    /// anything beside the unit's parameters and input, and
    /// [`LostGradients::BesideOutput`](crate::LostGradients::BesideOutput) if that left another
    /// recomputed unit. The backward fails with
    /// [`LostGradients::NotRepeatable`](crate::LostGradients::NotRepeatable) if the second run
    /// differs.
    pub fn recomputed(
        &self,
        name: &str,
        input: &Tensor,
        forward: RepeatableForward,
    ) -> Result<Tensor, Error> {
        if self.kind == PassKind::Evaluation {
            return self.unit(name, input, |parameters, input| forward(parameters, input));
        }
        self.told(name, self.run_first(name, input, forward))
    }

    fn run_first(
        &self,
        name: &str,
        input: &Tensor,
        forward: RepeatableForward,
    ) -> Result<Tensor, Error> {
        let own = self.find(name)?;
        let forward = self.with_cast(own, forward);
        let input = input.contiguous()?; // as the second run has it
        let usage = UnitUsage::of(own);
        own.gather()?;
        let reader = PassReader { pass: self, own, usage: &usage };
        let first = FirstRun { reader, reads: Mutex::default(), leaves: Mutex::default() };
        let output = self.first_output(&first, &input, forward);
        let ended = first.end();
        let output = output?;
        ended?;
        usage.reshard()?;
        Ok(output)
    }

    fn first_output(
        &self,
        first: &FirstRun<'_>,
        input: &Tensor,
        forward: RepeatableForward,
    ) -> Result<Tensor, Error> {
        let PassReader { own, usage, .. } = first.reader;
        // A variable, so that a tensor which leaves the forward beside its output is noticed.
        let leaf = input_leaf(input)?;
        let output = forward(first, &leaf);
        let own_leaves: HashSet<_> =
            first.leaves.lock().iter().map(|it| it.leaf.id()).chain([leaf.id()]).collect();
        self.first_runs.note_leaves(own.name(), &own_leaves);
        let output = output?;
        let mut reached = Reached::from(&output);
        self.first_runs.note_rounding(reached.rounds_to);
        reached.programs.retain(|variable| !own_leaves.contains(&variable.id()));
        self.first_runs.check(&reached, &format_args!("recomputed unit {}", own.name()))?;
        if let Some(what) = reached.described() {
            return Err(Error::LostGradients(LostGradients::History {
                unit: own.name().to_owned(),
                what,
            }));
        }
        let depends_on_input = reached.has(leaf.id());
        let reads = std::mem::take(&mut *first.reads.lock());
        if !depends_on_input && !reads.iter().any(RecomputedRead::is_trainable) {
            return Ok(output.detach().copy()?);
        }
        await_gradients(usage, &reads);
        let op = RecomputeOp {
            own: Arc::clone(own),
            forward,
            usage: Arc::clone(usage),
            reads,
            output: Mutex::new(Some(output.detach())),
        };
        if depends_on_input {
            return Ok(self.anchor.apply_op2(input, op)?);
        }
        // Tensors before the input are no parents of an output that does not depend on it.
        let output = self.anchor.apply_op2(&input.detach(), op)?;
        if is_differentiated(input) {
            self.cuts.note(own.name(), &output);
        }
        Ok(output)
    }
}

impl Pass<'_> {
    /// Adds the cast of the input to the forward of a unit, if the pass casts inputs. Both runs of
    /// a recomputed unit cast, so the graph between the units keeps no second copy of the input.
    fn with_cast(&self, own: &LiveUnit, forward: RepeatableForward) -> RepeatableForward {
        if !self.casts_inputs {
            return forward;
        }
        let dtype = own.dtype();
        Arc::new(move |parameters, input| forward(parameters, &cast_input(input, dtype)?))
    }
}

/// Makes the units wait for the backward of this use: for gradients of trainable parameters, and
/// for a release of frozen ones.
fn await_gradients(usage: &UnitUsage, reads: &[RecomputedRead]) {
    for RecomputedRead { unit, index } in reads {
        match unit.role(*index) {
            Role::Frozen => usage.reads_frozen(unit),
            Role::Trainable => unit.awaits_recomputed(),
        }
    }
}

/// Provides the first run with its parameters, and records which it reads. As in the second run,
/// each trainable one is a variable that holds the storage of a parameter during the run.
struct FirstRun<'a> {
    reader: PassReader<'a>,
    reads: Mutex<Vec<RecomputedRead>>,
    leaves: Mutex<Vec<Leaf>>,
}

/// A trainable parameter in a first run.
struct Leaf {
    id: ParamId,
    leaf: Tensor,
    /// Tensor that gets the storage back.
    tensor: Tensor,
}

impl FirstRun<'_> {
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

impl Parameters for FirstRun<'_> {
    fn get(&self, name: &str) -> candle_core::Result<Tensor> {
        Ok(self.read(name)?)
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
