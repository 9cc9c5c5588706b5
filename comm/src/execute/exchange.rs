//! The contribution to an operation that reads one buffer and fills another, and its output.

use hsdp_kernels::Element;

use crate::Lent;

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

/// The elements that a member gives, and the buffer that it fills, if it takes any.
pub(crate) struct Exchange<T> {
    pub(crate) source: Source<T>,
    pub(crate) target: Option<Vec<T>>,
}

impl<T: Element> Exchange<T> {
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
impl<T> From<Exchange<T>> for Vec<T> {
    fn from(exchange: Exchange<T>) -> Self {
        exchange.target.unwrap_or_else(|| exchange.source.into_elements())
    }
}

/// A member that takes nothing gets nothing.
impl<T> From<Exchange<T>> for Option<Vec<T>> {
    fn from(exchange: Exchange<T>) -> Self {
        exchange.target
    }
}

/// Both come back.
impl<T> From<Exchange<T>> for Lent<T> {
    fn from(exchange: Exchange<T>) -> Self {
        let Exchange { source, target } = exchange;
        Self { source: source.into_elements(), target: target.unwrap_or_default() }
    }
}

impl<T> From<Lent<T>> for Exchange<T> {
    fn from(lent: Lent<T>) -> Self {
        Self { source: Source::Lent(lent.source), target: Some(lent.target) }
    }
}
