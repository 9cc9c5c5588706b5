//! Operations that are opened one after the other, in the order in which this rank has issued them. `REMOTE.md`, "What lies on
//! devices".

use std::collections::VecDeque;
use std::sync::Arc;

use super::desk::Receiver;
use crate::Descriptor;
use crate::local::Operation;

/// An operation, and who lays what comes into its slots.
#[derive(Debug)]
pub(super) struct InLine {
    pub(super) receiver: Arc<dyn Receiver>,
    pub(super) operation: Arc<Operation>,
}

/// Operations that this rank has issued, but for those that are over.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// What was opened last.
    head: Option<Head>,
    waiting: VecDeque<InLine>,
}

/// It does not hold on to its receiver, which holds on to who keeps the line.
#[derive(Debug)]
struct Head {
    operation: Arc<Operation>,
    descriptor: Arc<Descriptor>,
}

impl Line {
    pub(super) fn push(&mut self, last: InLine) {
        self.waiting.push_back(last);
    }

    /// The next one, which is to be opened now: if there is one, and that before it is over.
    pub(super) fn next(&mut self) -> Option<InLine> {
        if !self.moves_on() {
            return None;
        }
        let next = self.waiting.pop_front()?;
        let descriptor = Arc::clone(next.receiver.descriptor());
        self.head = Some(Head { operation: Arc::clone(&next.operation), descriptor });
        Some(next)
    }

    /// Whether there is a next one.
    pub(super) fn moves_on(&self) -> bool {
        !self.waiting.is_empty() && self.is_free()
    }

    /// Whether all of them are over.
    pub(super) fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.is_free()
    }

    /// Whether any have stood in it.
    pub(super) fn serves(&self) -> bool {
        self.head.is_some()
    }

    /// The first that is not over, if `operation` stands behind it.
    pub(super) fn ahead_of(
        &self,
        operation: &Arc<Operation>,
    ) -> Option<(Arc<Operation>, Arc<Descriptor>)> {
        let place = self.waiting.iter().position(|it| Arc::ptr_eq(&it.operation, operation))?;
        if let Some(head) = self.head.as_ref().filter(|_| !self.is_free()) {
            return Some((Arc::clone(&head.operation), Arc::clone(&head.descriptor)));
        }
        let first = self.waiting.front().filter(|_| place > 0)?;
        Some((Arc::clone(&first.operation), Arc::clone(first.receiver.descriptor())))
    }

    /// Forgets everything: the world is over.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether the next may be opened.
    fn is_free(&self) -> bool {
        self.head.as_ref().is_none_or(|head| head.operation.is_settled())
    }
}
