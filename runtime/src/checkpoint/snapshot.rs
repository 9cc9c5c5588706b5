//! A copy of the elements that this rank writes: training goes on with the originals.

use hsdp_checkpoint::Slice;
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::UnitId;

use super::portions::{self, Source, Written};
use super::settings::Content;
use crate::error::Error;
use crate::model::ShardedModel;
use crate::persist::checkpointed::{Checkpointed, StateTensor};
use crate::persist::problem::{Problem, ProblemKind};
use crate::state::context::ModelId;

/// Elements of tensors, one after the other. The memory is reused from one snapshot to the next.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    elements: Vec<f32>,
    written: Vec<Written>,
    /// The model and the tensors of state to which `written` belongs.
    of: Option<(ModelId, Vec<StateTensor>)>,
}

impl Snapshot {
    /// Copies the elements that this rank writes of a model and its optimizer.
    ///
    /// # Errors
    /// If there is no memory for it, or a device fails.
    pub(super) fn copy<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        content: Content,
    ) -> Result<(), Problem> {
        self.know(model, optimizer.tensors(), content);
        self.make_room()?;
        let mut room = &mut *self.elements;
        for Written { source, .. } in &self.written {
            let (into, rest) = room.split_at_mut(source.len());
            match source {
                Source::Shard { unit, range } => copy_shard(model, (*unit, range.start), into)?,
                Source::State { kind, parameter, range } => {
                    let of = (*kind, *parameter);
                    let copied = optimizer.copy_state(model, of, (range.start, into))?;
                    debug_assert!(copied, "an optimizer has the tensors that it names");
                }
            }
            room = rest;
        }
        Ok(())
    }

    /// The copied elements, as slices for the files.
    pub(super) fn slices(&self) -> Vec<Slice<'_>> {
        let mut elements = &*self.elements;
        let slices = self.written.iter().map(|written| {
            let (own, rest) = elements.split_at(written.source.len());
            elements = rest;
            written.slice(own.into())
        });
        slices.collect()
    }

    /// Notes the names and places of the elements, which are the same for each snapshot of the checkpoints of a model.
    fn know(&mut self, model: &ShardedModel, states: Vec<StateTensor>, content: Content) {
        if self.of.as_ref().is_some_and(|(id, known)| id == model.id() && *known == states) {
            return;
        }
        self.written = portions::to_write(&model.engine.context, &states, content);
        self.of = Some((model.id().clone(), states));
    }

    fn make_room(&mut self) -> Result<(), Problem> {
        let len = self.written.iter().map(|written| written.source.len()).sum();
        let _snapshot = memory::scope(Category::Snapshot);
        if self.elements.len() != len {
            self.elements = Vec::new();
            self.elements = bytemuck::allocation::try_zeroed_vec(len).map_err(|()| {
                let bytes = len * size_of::<f32>();
                let what =
                    format!("out of memory: the copy of the saved state needs {bytes} bytes");
                Problem { kind: ProblemKind::Lasting, what }
            })?;
        }
        Ok(())
    }
}

fn copy_shard(
    model: &ShardedModel,
    (unit, from): (UnitId, usize),
    into: &mut [f32],
) -> Result<(), Error> {
    let engine = &model.engine;
    engine.state().shards[unit.index()].copy_to(&engine.context, from, into)
}
