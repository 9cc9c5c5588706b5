//! The contributions to operations that read one buffer and fill another, and their outputs.

use hsdp_kernels::Element;

use super::buffers::{Buffers, imagine};
use crate::pattern::Pattern;

/// The buffer to be read. Members may differ in the variant.
pub(crate) enum Source<T> {
    /// Dropped as soon as the work is done.
    Given(Vec<T>),
    /// Handed back with the output.
    Lent(Vec<T>),
}

impl<T> Source<T> {
    pub(crate) fn nothing() -> Self {
        Self::Given(Vec::new())
    }

    pub(crate) fn elements(&self) -> &[T] {
        let (Self::Given(elements) | Self::Lent(elements)) = self;
        elements
    }

    pub(crate) fn len(&self) -> usize {
        self.elements().len()
    }

    pub(crate) fn into_elements(self) -> Vec<T> {
        let (Self::Given(elements) | Self::Lent(elements)) = self;
        elements
    }
}

/// The buffers that a member lends to a call. Both come back when the call is complete, and are lost if it is refused or
/// fails.
///
/// To allocate a large output for a call costs more than the call itself, since each of its pages is touched for the
/// first time.
#[derive(Clone, Debug, PartialEq)]
pub struct Lent<T> {
    /// The input. It comes back unchanged.
    pub source: Vec<T>,
    /// The output. Its old elements are not read.
    pub target: Vec<T>,
}

/// The elements that a member gives, and the buffer that it fills, if it takes any.
pub(crate) struct MemberBuffers<T> {
    pub(crate) source: Source<T>,
    pub(crate) target: Option<Vec<T>>,
}

impl<T: Element> MemberBuffers<T> {
    /// The output when the work is done: a source that was given is dropped now, and not when the member waits.
    pub(crate) fn done(source: Source<T>, target: Option<Vec<T>>) -> Self {
        let source = match source {
            Source::Given(_) => Source::nothing(),
            Source::Lent(elements) => Source::Lent(elements),
        };
        Self { source, target }
    }
}

/// A member that takes nothing keeps its source.
impl<T> From<MemberBuffers<T>> for Vec<T> {
    fn from(buffers: MemberBuffers<T>) -> Self {
        buffers.target.unwrap_or_else(|| buffers.source.into_elements())
    }
}

/// A member that takes nothing gets nothing.
impl<T> From<MemberBuffers<T>> for Option<Vec<T>> {
    fn from(buffers: MemberBuffers<T>) -> Self {
        buffers.target
    }
}

/// Both come back.
impl<T> From<MemberBuffers<T>> for Lent<T> {
    fn from(buffers: MemberBuffers<T>) -> Self {
        let MemberBuffers { source, target } = buffers;
        Self { source: source.into_elements(), target: target.unwrap_or_default() }
    }
}

impl<T> From<Lent<T>> for MemberBuffers<T> {
    fn from(lent: Lent<T>) -> Self {
        Self { source: Source::Lent(lent.source), target: Some(lent.target) }
    }
}

impl<T: Element> Buffers for MemberBuffers<T> {
    type Output = Self;

    fn output_alone(self, pattern: &Pattern<'_>) -> Self {
        let Self { source, mut target } = self;
        if let Some(target) = &mut target {
            imagine(pattern, source.elements(), target);
        }
        Self { source, target }
    }
}

/// The contribution of a member to an all_to_all.
pub(crate) struct Splits<T> {
    pub(crate) buffers: MemberBuffers<T>,
    pub(crate) send: Vec<usize>,
    pub(crate) receive: Vec<usize>,
}

impl<T: Element> Buffers for Splits<T> {
    type Output = MemberBuffers<T>;

    fn pattern<'a>(&'a self, plain: Pattern<'a>) -> Pattern<'a> {
        plain.dealt(&self.send, &self.receive)
    }

    fn output_alone(self, pattern: &Pattern<'_>) -> MemberBuffers<T> {
        self.buffers.output_alone(&pattern.dealt(&self.send, &self.receive))
    }
}

/// Whether each member sends what the others expect, by slot: what it sends and what it expects.
pub(crate) fn check_pairs(splits: &[(&Vec<usize>, &Vec<usize>)]) -> Result<(), String> {
    for (from, (send, _)) in splits.iter().enumerate() {
        for (to, (_, receive)) in splits.iter().enumerate() {
            if send.get(to) != receive.get(from) {
                return Err(format!(
                    "member {from} sends {} elements to member {to}, which expects {},",
                    send[to], receive[from]
                ));
            }
        }
    }
    Ok(())
}
