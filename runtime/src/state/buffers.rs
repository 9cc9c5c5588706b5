//! The values of a model's buffers on this rank: as the last step left them, and as the present
//! step has written them.

use std::mem;
use std::ops::Range;

use hsdp_kernels::memory::Category;
use hsdp_sharding::{BufferId, BufferRule, ModelSpec};

use crate::state::store::zeros_in;

/// The buffers of a model, whole on this rank, in declared order.
#[derive(Debug, Default)]
pub(crate) struct ModelBuffers {
    places: Vec<BufferPlace>,
    /// The values that the last step left.
    committed: Vec<f32>,
    /// The values that the present step has written, if it has written any.
    written: Vec<f32>,
    /// The values that the last step left, while averages are in their place.
    own: Option<Vec<f32>>,
    /// Whether the present step has written any.
    is_written: bool,
    /// The number of microbatches of the present step that the program of this rank has begun.
    microbatches: u64,
}

/// A buffer: its place among the values of all, and its writes in the present step.
#[derive(Clone, Debug)]
struct BufferPlace {
    id: BufferId,
    range: Range<usize>,
    rule: BufferRule,
    /// The number of microbatches that have written it, and the last of them.
    writes: u64,
    last_writer: Option<usize>,
}

impl ModelBuffers {
    /// Makes the buffers of a model of zeros.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn zeros(spec: &ModelSpec) -> Result<Self, hsdp_kernels::Error> {
        let mut places = Vec::new();
        let mut len = 0;
        for (id, buffer) in spec.buffers() {
            let range = len..len + buffer.numel();
            len = range.end;
            let rule = buffer.buffer.unwrap_or(BufferRule::Equal);
            places.push(BufferPlace { id, range, rule, writes: 0, last_writer: None });
        }
        let committed = zeros_in(Category::Buffers, len)?;
        let written = zeros_in(Category::Buffers, len)?;
        Ok(Self { places, committed, written, own: None, is_written: false, microbatches: 0 })
    }

    /// Returns a buffer as the present step has written it, or else as the last one left it.
    pub(crate) fn value(&self, id: BufferId) -> &[f32] {
        &self.now()[self.range(id)]
    }

    /// Returns the buffers as the last step left them, with their ids.
    pub(crate) fn committed(&self) -> impl Iterator<Item = (BufferId, &[f32])> {
        self.places.iter().map(|place| (place.id, &self.committed[place.range.clone()]))
    }

    /// Returns a buffer as the last step left it.
    pub(crate) fn committed_value(&self, id: BufferId) -> &[f32] {
        &self.committed[self.range(id)]
    }

    /// Returns all buffers as the last step left them, one after the other in declared order.
    pub(crate) fn all_committed(&self) -> &[f32] {
        &self.committed
    }

    /// Replaces all buffers between steps by `values`, one after the other in declared order.
    ///
    /// # Panics
    /// If there is another number of values.
    pub(crate) fn set_all(&mut self, values: &[f32]) {
        self.committed.copy_from_slice(values);
    }

    /// Puts averages in the place of all buffers, until [`restore`](Self::restore).
    pub(crate) fn stand_in(&mut self, averages: Vec<f32>) {
        debug_assert_eq!(averages.len(), self.committed.len(), "an average has all buffers");
        self.own = Some(mem::replace(&mut self.committed, averages));
    }

    /// Gives the buffers their own values again.
    pub(crate) fn restore(&mut self) {
        if let Some(own) = self.own.take() {
            self.committed = own;
        }
    }

    /// Replaces a buffer between steps.
    ///
    /// # Panics
    /// If `values` has another number of elements.
    pub(crate) fn set(&mut self, id: BufferId, values: &[f32]) {
        let range = self.range(id);
        self.committed[range].copy_from_slice(values);
    }

    /// Notes that the program of this rank has begun a microbatch.
    pub(crate) fn begin_microbatch(&mut self) {
        self.microbatches += 1;
    }

    /// Writes a buffer in a microbatch of the present step.
    ///
    /// # Panics
    /// If `values` has another number of elements.
    pub(crate) fn write(&mut self, id: BufferId, microbatch: usize, values: &[f32]) {
        self.begin_to_write();
        let at = self.place(id);
        let place = &mut self.places[at];
        place.writes += u64::from(place.last_writer != Some(microbatch));
        place.last_writer = Some(microbatch);
        self.written[place.range.clone()].copy_from_slice(values);
    }

    /// Returns the number of microbatches of the present step that the program has begun.
    pub(crate) fn microbatches(&self) -> u64 {
        self.microbatches
    }

    /// Returns the number of these that have written each buffer, in declared order.
    pub(crate) fn writes(&self) -> impl Iterator<Item = u64> {
        self.places.iter().map(|place| place.writes)
    }

    /// Returns the values of the buffers that have this rule, in declared order, as the present
    /// step has written them.
    pub(crate) fn of_rule(&self, rule: BufferRule) -> impl Iterator<Item = &[f32]> {
        let of_rule = self.places.iter().filter(move |place| place.rule == rule);
        of_rule.map(|place| &self.now()[place.range.clone()])
    }

    /// Replaces all buffers that have this rule, in the present step, by `values`, one after the
    /// other in declared order.
    ///
    /// # Panics
    /// If there are fewer values.
    pub(crate) fn replace(&mut self, rule: BufferRule, mut values: &[f32]) {
        self.begin_to_write();
        for place in self.places.iter().filter(|place| place.rule == rule) {
            let own;
            (own, values) = values.split_at(place.range.len());
            self.written[place.range.clone()].copy_from_slice(own);
        }
    }

    /// Ends a step that counts: its values are those of the next one.
    pub(crate) fn commit(&mut self) {
        if self.is_written {
            mem::swap(&mut self.committed, &mut self.written);
        }
        self.discard();
    }

    /// Ends a step that does not count.
    pub(crate) fn discard(&mut self) {
        self.is_written = false;
        self.microbatches = 0;
        for place in &mut self.places {
            place.writes = 0;
            place.last_writer = None;
        }
    }

    fn begin_to_write(&mut self) {
        if !self.is_written {
            self.written.copy_from_slice(&self.committed);
            self.is_written = true;
        }
    }

    fn now(&self) -> &[f32] {
        if self.is_written { &self.written } else { &self.committed }
    }

    fn range(&self, id: BufferId) -> Range<usize> {
        self.places[self.place(id)].range.clone()
    }

    fn place(&self, id: BufferId) -> usize {
        let at = self.places.binary_search_by_key(&id, |place| place.id);
        at.expect("the model has this buffer")
    }
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::{Param, Unit};

    use super::*;

    fn spec() -> ModelSpec {
        let buffer = |name, len| Param::new(name, [len]);
        ModelSpec::new()
            .unit(Unit::new("a").param(buffer("a.mean", 2).buffer()))
            .unit(Unit::new("b").param(buffer("b.own", 3).averaged_buffer()))
            .unit(Unit::new("c").param(buffer("c.mean", 1).buffer()))
    }

    fn of(buffers: &ModelBuffers) -> Vec<Vec<f32>> {
        buffers.committed().map(|(_, values)| values.to_vec()).collect()
    }

    #[test]
    fn a_step_that_does_not_count_leaves_the_values_of_the_last_one() {
        let spec = spec();
        let id = |name| spec.find_buffer(name).expect("it is declared");
        let mut buffers = ModelBuffers::zeros(&spec).expect("there is memory");
        buffers.set(id("a.mean"), &[1.0, 2.0]);
        buffers.write(id("a.mean"), 0, &[3.0, 4.0]);
        assert_eq!(buffers.value(id("a.mean")), [3.0, 4.0], "a later microbatch sees the write");
        buffers.discard();
        assert_eq!(buffers.value(id("a.mean")), [1.0, 2.0]);
        buffers.write(id("c.mean"), 0, &[5.0]);
        buffers.write(id("c.mean"), 1, &[6.0]);
        buffers.write(id("c.mean"), 1, &[6.0]);
        assert!(buffers.writes().eq([0, 0, 2]), "a microbatch counts once");
        buffers.commit();
        assert_eq!(of(&buffers), [vec![1.0, 2.0], vec![0.0; 3], vec![6.0]]);
        assert!(buffers.writes().eq([0; 3]));
    }

    #[test]
    fn buffers_of_one_rule_are_replaced_together() {
        let mut buffers = ModelBuffers::zeros(&spec()).expect("there is memory");
        buffers.replace(BufferRule::Equal, &[1.0, 2.0, 7.0]);
        buffers.replace(BufferRule::Averaged, &[0.5; 3]);
        let equal: Vec<_> = buffers.of_rule(BufferRule::Equal).collect();
        assert_eq!(equal, [&[1.0, 2.0][..], &[7.0]]);
        buffers.commit();
        assert_eq!(of(&buffers), [vec![1.0, 2.0], vec![0.5; 3], vec![7.0]]);
    }
}
