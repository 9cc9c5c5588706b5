//! A copy of what this rank writes: training goes on with the original.

use std::ops::Range;

use hsdp_checkpoint::{Slice, state_tensor};
use hsdp_kernels::memory::{self, Category};
use hsdp_sharding::Role;

use super::Checkpointed;
use super::portions::{self, Portion};
use super::together::{Kind, Problem};
use crate::error::Error;
use crate::model::{ModelId, ShardedModel};

/// Elements of tensors, one after the other. Its memory serves one snapshot after the other.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    elements: Vec<f32>,
    tensors: Vec<Copied>,
    /// Of which model `tensors` speaks, and of which kinds of state.
    of: Option<(ModelId, &'static [&'static str])>,
}

/// Some consecutive elements of a tensor.
#[derive(Debug)]
struct Copied {
    portion: Portion,
    /// `None` of a parameter.
    kind: Option<&'static str>,
    name: String,
    /// Where they are in the snapshot.
    range: Range<usize>,
}

impl Snapshot {
    /// Copies what this rank writes of a model and its optimizer.
    ///
    /// # Errors
    /// If there is no memory for it, or a device fails.
    pub(super) fn copy<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
    ) -> Result<(), Problem> {
        self.know(model, optimizer);
        self.make_room()?;
        let Self { elements, tensors, .. } = self;
        for Copied { portion, kind, range, .. } in tensors {
            let (from, into) = (portion.range.start, &mut elements[range.clone()]);
            match kind {
                None => copy_shard(model, (portion, from), into)?,
                Some(kind) => {
                    optimizer.copy_state(model, (kind, portion.unit), (from, into))?;
                }
            }
        }
        Ok(())
    }

    /// What it has, for the files.
    pub(super) fn slices(&self) -> Vec<Slice<'_>> {
        let slice = |copied: &'_ Copied| {
            let Copied { portion: Portion { offset, .. }, range, .. } = copied;
            (*offset, range.clone())
        };
        let slices = self.tensors.iter().map(|copied| {
            let (offset, range) = slice(copied);
            let (tensor, shape) = (copied.name.as_str(), copied.portion.shape.as_slice());
            Slice { tensor, shape, offset, values: &self.elements[range] }
        });
        slices.collect()
    }

    /// Names and places, which are the same each time.
    fn know<O: Checkpointed>(&mut self, model: &ShardedModel, optimizer: &O) {
        let kinds = optimizer.state_kinds();
        if self.of.as_ref().is_some_and(|(id, known)| id == model.id() && *known == kinds) {
            return;
        }
        let portions = portions::to_write(&model.engine.fabric);
        let (mut tensors, mut at) = (Vec::new(), 0);
        for kind in [None].into_iter().chain(kinds.iter().copied().map(Some)) {
            let has = |it: &&Portion| kind.is_none() || it.role == Role::Trainable;
            for portion in portions.iter().filter(has).cloned() {
                let parameter = portion.name.as_str();
                let name =
                    kind.map_or_else(|| parameter.to_owned(), |kind| state_tensor(kind, parameter));
                let range = at..at + portion.range.len();
                at = range.end;
                tensors.push(Copied { portion, kind, name, range });
            }
        }
        (self.tensors, self.of) = (tensors, Some((model.id().clone(), kinds)));
    }

    fn make_room(&mut self) -> Result<(), Problem> {
        let len = self.tensors.last().map_or(0, |last| last.range.end);
        let _snapshot = memory::scope(Category::Snapshot);
        if self.elements.len() != len {
            self.elements = Vec::new();
            self.elements = bytemuck::allocation::try_zeroed_vec(len).map_err(|()| {
                let bytes = len * size_of::<f32>();
                let what = format!("no memory for a copy of what is saved, {bytes} bytes");
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
