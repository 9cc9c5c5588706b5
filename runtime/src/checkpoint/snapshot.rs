//! A copy of the elements that this rank writes: training goes on with the originals.

use hsdp_checkpoint::Slice;
use hsdp_kernels::memory::{self, Category};

use super::portions::{self, Portion, Written};
use super::together::{Kind, Problem};
use super::{Checkpointed, Content};
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};

/// Elements of tensors, one after the other. The memory is reused from one snapshot to the next.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    elements: Vec<f32>,
    written: Vec<Written>,
    /// The model and the kinds of state to which `written` belongs.
    of: Option<(ModelId, &'static [&'static str])>,
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
        let kinds = optimizer.state_kinds();
        self.know(model, kinds, content);
        self.make_room()?;
        let mut room = &mut *self.elements;
        for Written { portion, kind, .. } in &self.written {
            let (into, rest) = room.split_at_mut(portion.range.len());
            let from = portion.range.start;
            match kind {
                None => copy_shard(model, (portion, from), into)?,
                Some(kind) => {
                    optimizer.copy_state(model, (kinds[*kind], portion.unit), (from, into))?;
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
            let (own, rest) = elements.split_at(written.portion.range.len());
            elements = rest;
            written.slice(own.into())
        });
        slices.collect()
    }

    /// Notes the names and places of the elements, which are the same for each snapshot of the checkpoints of a model.
    fn know(&mut self, model: &ShardedModel, kinds: &'static [&'static str], content: Content) {
        if self.of.as_ref().is_some_and(|(id, known)| id == model.id() && *known == kinds) {
            return;
        }
        self.written = portions::to_write(&model.engine.fabric, kinds, content);
        self.of = Some((model.id().clone(), kinds));
    }

    fn make_room(&mut self) -> Result<(), Problem> {
        let len = self.written.iter().map(|written| written.portion.range.len()).sum();
        let _snapshot = memory::scope(Category::Snapshot);
        if self.elements.len() != len {
            self.elements = Vec::new();
            self.elements = bytemuck::allocation::try_zeroed_vec(len).map_err(|()| {
                let bytes = len * size_of::<f32>();
                let what =
                    format!("out of memory: the copy of the saved state needs {bytes} bytes");
                Problem { kind: Kind::Lasting, what }
            })?;
        }
        Ok(())
    }
}

fn copy_shard(
    model: &ShardedModel,
    (portion, from): (&Portion, usize),
    into: &mut [f32],
) -> Result<(), Error> {
    let engine = &model.engine;
    engine.state().shards[portion.unit.index()].copy_to(&engine.fabric, from, into)
}
