//! Operations that are opened one after the other, in the order in which this rank has issued them. `REMOTE.md`,
//! "Operations on devices".

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::mailbox::Receiver;
use crate::Descriptor;
use crate::backend::thread::Operation;

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

/// It holds on to nothing: not to the receiver, which holds on to who keeps the line, nor to what the operation has made.
#[derive(Debug)]
struct Head {
    operation: Weak<Operation>,
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
        self.head = Some(Head { operation: Arc::downgrade(&next.operation), descriptor });
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

    /// The first that is not over, if `operation` stands behind it.
    pub(super) fn ahead_of(
        &self,
        operation: &Arc<Operation>,
    ) -> Option<(Arc<Operation>, Arc<Descriptor>)> {
        let place = self.waiting.iter().position(|it| Arc::ptr_eq(&it.operation, operation))?;
        if let Some((head, open)) = self.open() {
            return Some((open, Arc::clone(&head.descriptor)));
        }
        let first = self.waiting.front().filter(|_| place > 0)?;
        Some((Arc::clone(&first.operation), Arc::clone(first.receiver.descriptor())))
    }

    /// Whether the next may be opened.
    fn is_free(&self) -> bool {
        self.open().is_none()
    }

    /// What was opened last, if it is not over.
    fn open(&self) -> Option<(&Head, Arc<Operation>)> {
        let head = self.head.as_ref()?;
        let operation = head.operation.upgrade().filter(|operation| !operation.is_settled())?;
        Some((head, operation))
    }
}
