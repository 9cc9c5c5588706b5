//! The messages between this process and one other: in pieces, as large as the coordinator passes on, and never more of them under
//! way than it keeps.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::remote::Message;

/// Bytes of a piece's head.
const HEAD: usize = 24;

/// Bytes of a message in one piece, at most.
pub(super) const MOST_PIECE: usize = hsdp_control::MOST_MESSAGE - HEAD;

/// A part of a message; or, of a message of no bytes, only word of what has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// The number of its message's world.
    world: u32,
    /// How many pieces of the other its sender has taken.
    taken: u32,
    /// Of the whole message.
    bytes: u64,
    offset: u64,
    part: &'a [u8],
}

impl<'a> Piece<'a> {
    /// # Errors
    /// What it is not.
    pub(super) fn read(piece: &'a [u8]) -> Result<Self, String> {
        let (head, part) = piece.split_at_checked(HEAD).ok_or("a piece without a head")?;
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let (bytes, offset) = (long(8), long(16));
        let end = offset.checked_add(part.len() as u64);
        if end.is_none_or(|end| end > bytes) || part.is_empty() != (bytes == 0) {
            return Err(format!(
                "a piece of {} bytes at offset {offset} of a message of {bytes} bytes",
                part.len()
            ));
        }
        Ok(Self { world: word(0), taken: word(4), bytes, offset, part })
    }

    fn write(&self) -> Vec<u8> {
        let mut piece = Vec::with_capacity(HEAD + self.part.len());
        piece.extend(self.world.to_le_bytes());
        piece.extend(self.taken.to_le_bytes());
        piece.extend(self.bytes.to_le_bytes());
        piece.extend(self.offset.to_le_bytes());
        piece.extend_from_slice(self.part);
        piece
    }
}

/// A message of a world that has come whole.
pub(super) type Came = (u32, Vec<u8>);

/// Both directions, for all worlds. Counts of pieces go around at 2^32.
#[derive(Debug)]
pub(super) struct Passage {
    /// Pieces that may be on their way.
    most: u32,
    sending: VecDeque<Sending>,
    sent: u32,
    /// Of what was sent.
    taken: u32,
    coming: Option<Coming>,
    came: u32,
    /// Of what came: as the other was told.
    told: u32,
}

/// A message of a world, of which so much has been sent.
#[derive(Debug)]
struct Sending {
    world: u32,
    message: Arc<Message>,
    sent: usize,
}

/// A message of a world, of so many bytes, and what has come of it.
#[derive(Debug)]
struct Coming {
    world: u32,
    bytes: u64,
    came: Vec<u8>,
}

impl Passage {
    /// One to a member for which the coordinator keeps so many frames of this one.
    pub(super) fn new(kept: usize) -> Self {
        // Two are left for word of what has come: it is sent when half of what may be under way is.
        let most = u32::try_from(kept.saturating_sub(2)).unwrap_or(u32::MAX).max(1);
        let (sending, coming) = (VecDeque::new(), None);
        Self { most, sending, sent: 0, taken: 0, coming, came: 0, told: 0 }
    }

    pub(super) fn send(&mut self, world: u32, message: Arc<Message>) {
        self.sending.push_back(Sending { world, message, sent: 0 });
    }

    /// How many messages of a world are not on their way, or not all of them; or have come in part.
    pub(super) fn under_way(&self, world: u32) -> usize {
        let sending = self.sending.iter().filter(|sending| sending.world == world).count();
        sending + usize::from(self.coming.as_ref().is_some_and(|coming| coming.world == world))
    }

    /// The other takes nothing any more.
    pub(super) fn give_up(&mut self) {
        self.sending.clear();
    }

    /// The next piece to be passed, if one may be.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        let is_open = self.sent.wrapping_sub(self.taken) < self.most;
        let taken = self.came;
        if let Some(first) = self.sending.front_mut().filter(|_| is_open) {
            let bytes = first.message.bytes();
            let end = bytes.len().min(first.sent + MOST_PIECE);
            let part = &bytes[first.sent..end];
            let (len, offset) = (bytes.len() as u64, first.sent as u64);
            let piece = Piece { world: first.world, taken, bytes: len, offset, part }.write();
            first.sent = end;
            if end == bytes.len() {
                self.sending.pop_front();
            }
            self.sent = self.sent.wrapping_add(1);
            self.told = self.came;
            return Some(piece);
        }
        if self.came.wrapping_sub(self.told) < self.most.div_ceil(2) {
            return None;
        }
        self.told = self.came;
        Some(Piece { world: 0, taken, bytes: 0, offset: 0, part: &[] }.write())
    }

    /// A piece has come; with the last one of a message, that message.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn take(&mut self, piece: &Piece<'_>) -> Result<Option<Came>, String> {
        if piece.taken.wrapping_sub(self.taken) > self.sent.wrapping_sub(self.taken) {
            let (taken, sent) = (piece.taken, self.sent);
            return Err(format!("it acknowledges {taken} pieces, but {sent} were sent"));
        }
        self.taken = piece.taken;
        if piece.bytes == 0 {
            return Ok(None);
        }
        self.came = self.came.wrapping_add(1);
        let Piece { world, bytes, offset, part, .. } = *piece;
        let begun = || Coming { world, bytes, came: Vec::new() };
        let coming = self.coming.get_or_insert_with(begun);
        if (coming.world, coming.bytes, coming.came.len() as u64) != (world, bytes, offset) {
            return Err(format!(
                "a piece at offset {offset} of a message of {bytes} bytes in world {world}, but the next expected byte is {} of {} in world {}",
                coming.came.len(),
                coming.bytes,
                coming.world
            ));
        }
        // Memory for what has come, not for what is announced.
        coming.came.extend_from_slice(part);
        if (coming.came.len() as u64) < bytes {
            return Ok(None);
        }
        Ok(self.coming.take().map(|whole| (whole.world, whole.came)))
    }
}

#[cfg(test)]
mod tests;
