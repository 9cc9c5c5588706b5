//! The results of an exchange, which wait for their update.

use crate::optimizer::updating::Updating;

/// New elements of the parts that this rank has sent, until the last of them is applied.
#[derive(Debug, Default)]
pub(in crate::optimizer) struct Staged {
    /// In the order in which the parts were sent.
    values: Vec<f32>,
    /// The elements that are still to be updated.
    left: usize,
}

impl Staged {
    pub(in crate::optimizer) fn new(values: Vec<f32>) -> Self {
        Self { values, left: 0 }
    }

    pub(in crate::optimizer) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Begins the update of the elements.
    pub(in crate::optimizer) fn begin(&mut self, updating: &Updating<'_>) {
        self.left = updating.pieces().map(|(_, piece)| piece.len).sum();
        self.applied(0);
    }

    /// Counts elements that were updated. The last ones free the memory.
    pub(in crate::optimizer) fn applied(&mut self, len: usize) {
        self.left -= len;
        if self.left == 0 {
            *self = Self::default();
        }
    }
}
