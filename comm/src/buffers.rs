//! The contribution of a member to an operation: buffers to be read and filled, by the pattern of the operation.

use hsdp_kernels::{Element, Fold, HostBuffer};

use crate::Reduced;
use crate::collectives::Splits;
use crate::execute::{
    Exchange, Handing, Scaled, SharedGatherContribution, UnitGatherContribution,
    UnitReduceContribution, combine,
};
use crate::pattern::Pattern;

/// The buffers that a member brings to an operation.
pub(crate) trait Buffers: Send + 'static {
    /// The output of the member.
    type Output: Send + 'static;

    /// The pattern of the operation: the plain one of its descriptor, with what the member brings beside it.
    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain
    }

    /// The output of the member where no other exists: as if each gave what this one gives, where that makes sense.
    fn imagined(self, pattern: &Pattern<'_>) -> Self::Output;
}

impl<T: Element> Buffers for Exchange<T> {
    type Output = Self;

    fn imagined(self, pattern: &Pattern<'_>) -> Self {
        let Self { source, mut target } = self;
        if let Some(target) = &mut target {
            imagine(pattern, source.elements(), target);
        }
        Self { source, target }
    }
}

impl<T: Element> Buffers for Splits<T> {
    type Output = Exchange<T>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.dealt(&self.send, &self.receive)
    }

    fn imagined(self, pattern: &Pattern<'_>) -> Exchange<T> {
        self.exchange.imagined(&pattern.dealt(&self.send, &self.receive))
    }
}

impl<T: Element> Buffers for Vec<T> {
    type Output = Self;

    fn imagined(mut self, pattern: &Pattern<'_>) -> Self {
        imagine(pattern, &[], &mut self);
        self
    }
}

impl<T: Element> Buffers for Handing<T> {
    type Output = Vec<T>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.permuted(self.destination, self.giver)
    }

    fn imagined(self, pattern: &Pattern<'_>) -> Vec<T> {
        let is_own = self.destination == Some(pattern.slot());
        if is_own { self.values } else { bytemuck::zeroed_vec(self.values.len()) }
    }
}

impl Buffers for () {
    type Output = ();

    fn imagined(self, _pattern: &Pattern<'_>) {}
}

impl Buffers for UnitGatherContribution {
    type Output = Vec<HostBuffer>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Vec<HostBuffer> {
        self.targets
    }
}

impl<T: Send + Sync + 'static> Buffers for SharedGatherContribution<T> {
    type Output = Option<std::sync::Arc<T>>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.shared(self.layout.shard_size())
    }

    fn imagined(self, _pattern: &Pattern<'_>) -> Self::Output {
        None
    }
}

impl Buffers for UnitReduceContribution {
    type Output = Reduced;

    fn imagined(self, _pattern: &Pattern<'_>) -> Reduced {
        let Self { mut partial, fold, .. } = self;
        if fold == Fold::Replace {
            partial.fill(0.0);
        }
        Reduced { partial, non_finite: None }
    }
}

impl Buffers for Scaled {
    type Output = Vec<f32>;

    fn imagined(self, _pattern: &Pattern<'_>) -> Vec<f32> {
        self.0
    }
}

/// Fills `target` as if every member gave what this one has in `source`. Without a source it is combined in place.
fn imagine<T: Element>(pattern: &Pattern<'_>, source: &[T], target: &mut [T]) {
    if let Some(reduction) = pattern.combines(0) {
        let in_place = if source.is_empty() { target.to_vec() } else { Vec::new() };
        let own =
            if source.is_empty() { &in_place } else { &source[pattern.gives(0, pattern.slot())] };
        return combine(reduction, target, &vec![own; pattern.members()]);
    }
    let own = pattern.gives(0, pattern.slot());
    for from in 0..pattern.members() {
        let place = pattern.takes(0, from);
        if place.len() == own.len() {
            target[place].copy_from_slice(&source[own.clone()]);
        }
    }
}
