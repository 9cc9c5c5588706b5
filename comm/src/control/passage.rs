//! What goes between this rank and one other: letters in pieces, as large as the coordinator passes on, and never more of them under
//! way than it keeps.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::remote::Letter;

/// Bytes of a piece's head.
const HEAD: usize = 24;

/// Bytes of a letter in one piece, at most.
pub(super) const MOST_PIECE: usize = hsdp_control::MOST_VALUE - HEAD;

/// A part of a letter; or, of a letter of no bytes, only word of what has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    /// The number of its world.
    pub(super) world: u32,
    /// How many pieces of the other its sender has taken.
    taken: u32,
    /// Of the whole letter.
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
                "a piece of {} bytes from {offset} on of a letter of {bytes}",
                part.len()
            ));
        }
        Ok(Self { world: word(0), taken: word(4), bytes, offset, part })
    }

    fn write(&self) -> Vec<u8> {
        let heads = [self.world, self.taken].into_iter().flat_map(u32::to_le_bytes);
        let lengths = [self.bytes, self.offset].into_iter().flat_map(u64::to_le_bytes);
        heads.chain(lengths).chain(self.part.iter().copied()).collect()
    }
}

/// Both directions. Counts of pieces go around at 2^32.
#[derive(Debug)]
pub(super) struct Passage {
    world: u32,
    /// Pieces that may be on their way.
    most: u32,
    /// With how much of each has been sent.
    sending: VecDeque<(Arc<Letter>, usize)>,
    sent: u32,
    /// Of what was sent.
    taken: u32,
    /// As much as has come of the next letter.
    letter: Vec<u8>,
    came: u32,
    /// Of what came: as the other was told.
    told: u32,
}

impl Passage {
    /// One of a world, to a rank of which the coordinator keeps so many frames of this one.
    pub(super) fn new(world: u32, kept: usize) -> Self {
        // Two are left for word of what has come: it is sent when half of what may be under way is.
        let most = u32::try_from(kept.saturating_sub(2)).unwrap_or(u32::MAX).max(1);
        let (sending, letter) = (VecDeque::new(), Vec::new());
        Self { world, most, sending, sent: 0, taken: 0, letter, came: 0, told: 0 }
    }

    pub(super) fn send(&mut self, letter: Arc<Letter>) {
        self.sending.push_back((letter, 0));
    }

    /// How many letters are not on their way, or not all of them.
    pub(super) fn waiting(&self) -> usize {
        self.sending.len()
    }

    /// Whether a letter has come in part.
    pub(super) fn is_amid(&self) -> bool {
        !self.letter.is_empty()
    }

    /// The next piece to be passed, if one may be.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        let is_open = self.sent.wrapping_sub(self.taken) < self.most;
        let (world, taken) = (self.world, self.came);
        if let Some((letter, offset)) = self.sending.front_mut().filter(|_| is_open) {
            let bytes = letter.bytes();
            let end = bytes.len().min(*offset + MOST_PIECE);
            let part = &bytes[*offset..end];
            let (len, from) = (bytes.len() as u64, *offset as u64);
            let piece = Piece { world, taken, bytes: len, offset: from, part }.write();
            *offset = end;
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
        Some(Piece { world, taken, bytes: 0, offset: 0, part: &[] }.write())
    }

    /// A piece has come; with the last one of a letter, that letter.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn take(&mut self, piece: &Piece<'_>) -> Result<Option<Vec<u8>>, String> {
        if piece.taken.wrapping_sub(self.taken) > self.sent.wrapping_sub(self.taken) {
            let (taken, sent) = (piece.taken, self.sent);
            return Err(format!("{taken} pieces were taken, of {sent} that were sent"));
        }
        self.taken = piece.taken;
        if piece.bytes == 0 {
            return Ok(None);
        }
        self.came = self.came.wrapping_add(1);
        if piece.offset != self.letter.len() as u64 {
            let (offset, came) = (piece.offset, self.letter.len());
            return Err(format!("a piece from byte {offset} on, when {came} have come"));
        }
        // Memory for what has come, not for what is announced.
        self.letter.extend_from_slice(piece.part);
        let is_whole = self.letter.len() as u64 == piece.bytes;
        Ok(is_whole.then(|| std::mem::take(&mut self.letter)))
    }
}

#[cfg(test)]
mod tests;
