//! The contribution of a member to an operation: buffers to be read and filled, by the pattern of the operation.

use std::sync::Arc;

use hsdp_kernels::{Element, GradientValues};

use super::combine;
use crate::pattern::Pattern;

/// The buffers that a member brings to an operation.
pub(crate) trait Buffers: Send + 'static {
    /// The output of the member.
    type Output: Send + 'static;

    /// The pattern of the operation: the plain one of its descriptor, with what the member brings beside it.
    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain
    }

    /// Has contributions take in what only all of them together say.
    fn introduce(_all: &mut [Self])
    where
        Self: Sized,
    {
    }

    /// The gradients that the member brings, for a fault to poison; none of most operations.
    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        &mut []
    }

    /// The output of the member where no other exists: as if each gave what this one gives, where that makes sense.
    fn output_alone(self, pattern: &Pattern<'_>) -> Self::Output;
}

impl<T: Element> Buffers for Vec<T> {
    type Output = Self;

    fn output_alone(mut self, pattern: &Pattern<'_>) -> Self {
        imagine(pattern, &[], &mut self);
        self
    }
}

impl Buffers for () {
    type Output = ();

    fn output_alone(self, _pattern: &Pattern<'_>) {}
}

/// Fills `target` as if every member gave what this one has in `source`. Without a source it is combined in place.
pub(super) fn imagine<T: Element>(pattern: &Pattern<'_>, source: &[T], target: &mut [T]) {
    if let Some(reduction) = pattern.combines(0) {
        let in_place = if source.is_empty() { target.to_vec() } else { Vec::new() };
        let own =
            if source.is_empty() { &in_place } else { &source[pattern.gives(0, pattern.slot)] };
        return combine(reduction, target, &vec![own; pattern.members]);
    }
    let own = pattern.gives(0, pattern.slot);
    for from in 0..pattern.members {
        let place = pattern.takes(0, from);
        if place.len() == own.len() {
            target[place].copy_from_slice(&source[own.clone()]);
        }
    }
}
