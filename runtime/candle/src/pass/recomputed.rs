//! The first run of a recomputed unit, in the forward.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use hsdp::ModelSpec;
use hsdp_sharding::Role;
use parking_lot::Mutex;

use super::reader::Reader;
use super::{Kind, Pass};
use crate::dtype::cast_input;
use crate::error::Error;
use crate::model::{Parameters, RepeatableForward};
use crate::recompute::{Read, Recompute, is_differentiated};
use crate::unit::UnitState;
use crate::usage::Usage;

impl Pass<'_> {
    /// As [`unit`](Self::unit), but keeps none of the tensors that `forward` makes, except its output. The backward gathers the
    /// unit, as it does for `unit`, and runs `forward` again for its gradients (activation checkpointing). So one unit at a time
    /// has its activations, and each such unit computes its forward twice. The collectives are those of `unit`.
    ///
    /// `forward` must be repeatable: its second output must have the bits of the first. Tensors that it captures must have no
    /// history: it would lose their gradients. An input that is a view is copied first, to be contiguous.
    ///
    /// Losses and gradients have the bits that they have with `unit`. Only where candle adds more than two numbers, and the graph of
    /// the second run cuts this sum, another order may round otherwise: the gradient of a parameter that this unit reads more than
    /// once and another unit reads too, and that of an input that is also used outside of the unit.
    ///
    /// Waits for a gather over the shard group, which all its ranks issue in the plan's order.
    ///
    /// # Errors
    /// As [`unit`](Self::unit), and [`Error::History`] if the output has a history without the unit's parameters and input. The
    /// backward fails with [`Error::NotRepeatable`] if the second run differs.
    pub fn recomputed(
        &self,
        name: &str,
        input: &Tensor,
        forward: RepeatableForward,
    ) -> Result<Tensor, Error> {
        if self.kind == Kind::Evaluation {
            return self.unit(name, input, |parameters, input| forward(parameters, input));
        }
        self.told(&format_args!("unit {name}"), self.run_first(name, input, forward))
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
        let usage = Arc::new(Usage::default());
        usage.reads(own);
        own.gather()?;
        let reader = Reader { pass: self, own, usage: &usage, input: &input };
        let first = FirstRun { reader, reads: Mutex::default() };
        let output = forward(&first, &input.detach())?;
        if output.track_op() {
            return Err(Error::History { unit: name.to_owned() });
        }
        let reads = first.reads.into_inner();
        let output = match is_differentiated(&input) || reads.iter().any(Read::is_trainable) {
            true => {
                await_gradients(&usage, &reads);
                let (own, usage) = (Arc::clone(own), Arc::clone(&usage));
                let output = Mutex::new(Some(output));
                self.anchor.apply_op2(&input, Recompute { own, forward, usage, reads, output })?
            }
            false => output.copy()?,
        };
        usage.reshard()?;
        Ok(output)
    }
}

impl Pass<'_> {
    /// The forward of a unit, with the cast of its input if the pass casts inputs. Both runs of a recomputed unit cast: the graph
    /// between its units does not keep a second copy of the input.
    fn with_cast(&self, own: &UnitState, forward: RepeatableForward) -> RepeatableForward {
        if !self.casts_inputs {
            return forward;
        }
        let dtype = own.dtype();
        Arc::new(move |parameters, input| forward(parameters, &cast_input(input, dtype)?))
    }
}

/// Lets the units wait for the backward of this use: for gradients of trainable parameters, and a release for frozen ones.
fn await_gradients(usage: &Usage, reads: &[Read]) {
    for Read { unit, index } in reads {
        match unit.role(*index) {
            Role::Frozen => usage.reads_frozen(unit),
            Role::Trainable => unit.awaits_recomputed(),
        }
    }
}

/// Gives the first run its parameters, without a history, and notes which it reads.
struct FirstRun<'a> {
    reader: Reader<'a>,
    reads: Mutex<Vec<Read>>,
}

impl FirstRun<'_> {
    fn read(&self, name: &str) -> Result<Tensor, Error> {
        let (unit, id) = self.reader.gathered(name)?;
        let tensor = self.reader.tensor(unit, id)?;
        let mut reads = self.reads.lock();
        if !reads.iter().any(|read| read.is(id)) {
            reads.push(Read { unit: Arc::clone(unit), index: id.index });
        }
        Ok(tensor.detach())
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
