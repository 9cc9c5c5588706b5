//! The messages between this process and one other: in pieces, as large as the coordinator passes on, and never more of them under
//! way than it keeps.

use std::collections::VecDeque;
use std::sync::Arc;

use hsdp_control::Bytes;

use crate::remote::RankMessage;

/// Bytes of a piece's head.
const HEAD: usize = 20;

/// Bytes of a message in one piece, at most.
pub(super) const MOST_PIECE: usize = hsdp_control::MOST_MESSAGE - HEAD;

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MessagePiece {
    /// The number of its message's world.
    world: u32,
    /// Of the whole message.
    bytes: u64,
    offset: u64,
    part: Bytes,
}

impl MessagePiece {
    /// # Errors
    /// The reason why it is none.
    fn read(piece: &Bytes) -> Result<Self, String> {
        let head = piece.first_chunk::<HEAD>().ok_or("a piece without a head")?;
        let long = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight"));
        let world = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
        let bytes = long(4);
        let offset = long(12);
        let part = piece.slice(HEAD..);
        let end = offset.checked_add(part.len() as u64);
        if end.is_none_or(|end| end > bytes) || part.is_empty() {
            return Err(format!(
                "a piece of {} bytes at offset {offset} of a message of {bytes} bytes",
                part.len()
            ));
        }
        Ok(Self { world, bytes, offset, part })
    }
}

/// A message of a world that has come whole.
pub(super) type Came = (u32, Bytes);

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
    /// The number of received pieces that was reported to the other.
    told: u32,
}

/// A message of a world, of which so much has been sent.
#[derive(Clone, Debug)]
pub(super) struct Sending {
    world: u32,
    message: Arc<RankMessage>,
    sent: usize,
}

impl Sending {
    fn end(&self) -> usize {
        self.message.bytes().len().min(self.sent + MOST_PIECE)
    }

    /// The next piece, as it travels.
    pub(super) fn piece(&self) -> Bytes {
        let part = &self.message.bytes()[self.sent..self.end()];
        let mut piece = Vec::with_capacity(HEAD + part.len());
        piece.extend(self.world.to_le_bytes());
        piece.extend((self.message.bytes().len() as u64).to_le_bytes());
        piece.extend((self.sent as u64).to_le_bytes());
        piece.extend_from_slice(part);
        piece.into()
    }
}

/// Equal if the next pieces of both are.
impl PartialEq for Sending {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.message, &other.message)
            && (self.world, self.sent) == (other.world, other.sent)
    }
}

/// A message of a world, of so many bytes, and the part of it that has come.
#[derive(Debug)]
struct Coming {
    world: u32,
    bytes: u64,
    came: Vec<u8>,
}

impl Passage {
    /// One to a member for which the coordinator keeps so many frames of this one.
    pub(super) fn new(kept: usize) -> Self {
        // Two are left for reports of received pieces, which are sent when half of the pieces that may be under way have come.
        let most = u32::try_from(kept.saturating_sub(2)).unwrap_or(u32::MAX).max(1);
        let sending = VecDeque::new();
        let coming = None;
        Self { most, sending, sent: 0, taken: 0, coming, came: 0, told: 0 }
    }

    pub(super) fn send(&mut self, world: u32, message: Arc<RankMessage>) {
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

    /// The next that is to be passed, if anything may be: how many pieces of the other this rank has taken, and a piece; or that count alone.
    pub(super) fn next(&mut self) -> Option<(u32, Option<Sending>)> {
        let is_open = self.sent.wrapping_sub(self.taken) < self.most;
        let mut next = None;
        if let Some(first) = self.sending.front_mut().filter(|_| is_open) {
            next = Some(first.clone());
            first.sent = first.end();
            if first.sent == first.message.bytes().len() {
                self.sending.pop_front();
            }
            self.sent = self.sent.wrapping_add(1);
        } else if self.came.wrapping_sub(self.told) < self.most.div_ceil(2) {
            return None;
        }
        self.told = self.came;
        Some((self.came, next))
    }

    /// A piece has come, or none but a count; with the last piece of a message, that message.
    ///
    /// # Errors
    /// The problem with it.
    pub(super) fn take(&mut self, taken: u32, piece: &Bytes) -> Result<Option<Came>, String> {
        if taken.wrapping_sub(self.taken) > self.sent.wrapping_sub(self.taken) {
            let sent = self.sent;
            return Err(format!("it acknowledges {taken} pieces, but {sent} were sent"));
        }
        self.taken = taken;
        if piece.is_empty() {
            return Ok(None);
        }
        let MessagePiece { world, bytes, offset, part } = MessagePiece::read(piece)?;
        self.came = self.came.wrapping_add(1);
        if self.coming.is_none() && (offset, bytes) == (0, part.len() as u64) {
            return Ok(Some((world, part)));
        }
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
        // Memory for the bytes that have come, not for those that are announced.
        coming.came.extend_from_slice(&part);
        if (coming.came.len() as u64) < bytes {
            return Ok(None);
        }
        Ok(self.coming.take().map(|whole| (whole.world, whole.came.into())))
    }
}

#[cfg(test)]
mod tests;
