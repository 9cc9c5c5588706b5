//! The elements that a rank sends to another: a message has them alone, or with those of other ranks.

use std::ops::Range;
use std::sync::Arc;

use super::letter::Letter;

/// A part of the elements of a message, which stays as long as one of its parts does.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    letter: Arc<Letter>,
    range: Range<usize>,
}

impl Payload {
    /// All elements of a message.
    pub(super) fn whole(letter: Letter) -> Self {
        let range = 0..letter.body().len();
        Self { letter: Arc::new(letter), range }
    }

    /// Some bytes of a message's elements. They are aligned for all elements if the range begins at a multiple of 64.
    pub(super) fn part(letter: &Arc<Letter>, range: Range<usize>) -> Self {
        Self { letter: Arc::clone(letter), range }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.letter.body()[self.range.clone()]
    }
}
