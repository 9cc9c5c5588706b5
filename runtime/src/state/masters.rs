//! The elements of a shard that have an f32 master on a rank, and their places among the masters.

use std::ops::Range;

use hsdp_kernels::memory::{self, Category};

/// The trained elements of a shard that have an f32 master on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldMasters {
    /// These elements: all, or where replicas divide the state of optimizers the slice of this
    /// rank.
    pub(crate) trained: Range<usize>,
    /// The number of all trained elements, with their padding. Frozen ones follow them.
    pub(crate) all: usize,
    /// Whether each replica has the masters of its slice alone. The same on all ranks, also where a
    /// slice is empty and another is the whole.
    pub(crate) are_divided: bool,
}

impl HeldMasters {
    /// Returns the masters of parameters: of the elements that are held, and of frozen ones until
    /// the end of `masters`.
    pub(super) fn of(
        &self,
        parameters: Vec<f32>,
        masters: usize,
        category: Category,
    ) -> Result<Vec<f32>, hsdp_kernels::Error> {
        let held = self.trained.len();
        let frozen = masters - self.all;
        if held + frozen == parameters.len() {
            return Ok(parameters);
        }
        let mut master = {
            let _scope = memory::scope(category);
            hsdp_kernels::zeros(held + frozen)?
        };
        master[..held].copy_from_slice(&parameters[self.trained.clone()]);
        master[held..].copy_from_slice(&parameters[self.all..masters]);
        Ok(master)
    }

    /// Cuts a range of the shard where elements with and without a master meet, and returns for
    /// each part its place among the masters, if it has one. There are `masters` of them.
    pub(super) fn parts(
        &self,
        range: Range<usize>,
        masters: usize,
    ) -> impl Iterator<Item = (Range<usize>, Option<usize>)> + use<> {
        let Self { trained: Range { start, end }, all, .. } = *self;
        let frozen = masters > end - start;
        let places = [None, Some(0), None, frozen.then_some(end - start)];
        let cuts = [0, start, end, all, usize::MAX];
        let part = move |(place, cut): (Option<usize>, &[usize])| {
            let part = range.start.max(cut[0])..range.end.min(cut[1]);
            let place = place.map(|place| place + part.start.saturating_sub(cut[0]));
            (!part.is_empty()).then_some((part, place))
        };
        let parts: Vec<_> = places.into_iter().zip(cuts.windows(2)).filter_map(part).collect();
        parts.into_iter()
    }
}
