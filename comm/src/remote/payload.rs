//! The elements that a rank sends to another: a message has them alone, or with those of other ranks.

use std::ops::Range;
use std::sync::Arc;

use super::message::Message;

/// A part of the elements of a message, which stays as long as one of its parts does.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    message: Arc<Message>,
    range: Range<usize>,
}

impl Payload {
    /// All elements of a message.
    pub(super) fn whole(message: Message) -> Self {
        let range = 0..message.body().len();
        Self { message: Arc::new(message), range }
    }

    /// Some bytes of a message's elements. They are aligned for all elements if the range begins at a multiple of 64.
    pub(super) fn part(message: &Arc<Message>, range: Range<usize>) -> Self {
        Self { message: Arc::clone(message), range }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.message.body()[self.range.clone()]
    }
}
