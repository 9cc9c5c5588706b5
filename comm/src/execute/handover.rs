//! Operations that pass whole vectors on without copying them: permute, send and recv, barrier.

use hsdp_kernels::Element;

use super::{Buffers, Meter, Outputs, Work};
use crate::pattern::Pattern;

/// The contribution to a permutation.
pub(crate) struct Handing<T> {
    /// The slot of the member that gets it, if any does.
    pub(crate) destination: Option<usize>,
    /// The slot of the member that gives to this one, once that is known.
    pub(crate) giver: Option<usize>,
    pub(crate) values: Vec<T>,
}

impl<T: Element> Buffers for Handing<T> {
    type Output = Vec<T>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.permuted(self.destination, self.giver)
    }

    fn introduce(all: &mut [Self]) {
        for from in 0..all.len() {
            if let Some(to) = all[from].destination {
                all[to].giver = Some(from);
            }
        }
    }

    fn output_alone(self, pattern: &Pattern<'_>) -> Vec<T> {
        let is_own = self.destination == Some(pattern.slot);
        if is_own { self.values } else { bytemuck::zeroed_vec(self.values.len()) }
    }
}

/// By receiver: the member that gives to it.
pub(crate) fn sources_of(destinations: &[Option<usize>]) -> Result<Vec<Option<usize>>, String> {
    let mut sources = vec![None; destinations.len()];
    for (from, destination) in destinations.iter().enumerate() {
        let Some(to) = *destination else { continue };
        if let Some(other) = sources[to].replace(from) {
            return Err(format!(
                "members {other} and {from} both send their elements to member {to}"
            ));
        }
    }
    Ok(sources)
}

/// Vectors that change hands.
pub(crate) struct Handover<T> {
    values: Vec<Vec<T>>,
    /// For each member, the slot of the one whose vector it gets.
    sources: Vec<Option<usize>>,
    /// Elements of a vector that no member gives.
    zeros: usize,
}

impl<T: Element> Handover<T> {
    /// Member `i` gets the vector of member `sources[i]`, or `zeros` zeros. No source is named twice.
    pub(crate) fn new(values: Vec<Vec<T>>, sources: Vec<Option<usize>>, zeros: usize) -> Self {
        Self { values, sources, zeros }
    }
}

impl<T: Element> Work for Handover<T> {
    type Output = Vec<T>;

    fn blocks(&self) -> usize {
        0
    }

    fn bytes(&self) -> usize {
        0
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {}

    fn finish(mut self) -> Outputs<Vec<T>> {
        let take = |source: &Option<usize>| match *source {
            Some(source) => std::mem::take(&mut self.values[source]),
            None => bytemuck::zeroed_vec(self.zeros),
        };
        self.sources.iter().map(take).collect()
    }
}

/// A barrier: there is nothing to do but to be there.
pub(crate) struct Barrier(pub(crate) usize);

impl Work for Barrier {
    type Output = ();

    fn blocks(&self) -> usize {
        0
    }

    fn bytes(&self) -> usize {
        0
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {}

    fn finish(self) -> Outputs<()> {
        (0..self.0).map(|_| ()).collect()
    }
}
