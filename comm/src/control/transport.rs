//! Letters by the control plane.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_control::ControlError;
use hsdp_sharding::Rank;

use super::member::Member;
use super::passage::{Passage, Piece};
use crate::Error;
use crate::remote::{Buffer, Letter, Shelf, Transport, TransportError};
use crate::sync;

/// How often is looked what has become of the others.
const PERIOD: Duration = Duration::from_millis(100);

/// The letters of one world.
#[derive(Debug)]
pub(super) struct ControlTransport {
    member: Arc<Member>,
    world: u32,
    shelf: Arc<Shelf>,
    /// By rank.
    passages: Vec<Passage>,
    looked: Option<Instant>,
}

impl ControlTransport {
    pub(super) fn new(member: Arc<Member>, size: usize) -> Self {
        let (world, kept) = (member.next_world(), member.most_passed());
        let passages = (0..size).map(|_| Passage::new(world, kept)).collect();
        Self { member, world, shelf: Arc::default(), passages, looked: None }
    }

    /// Passes on what may be.
    fn pass(&mut self, to: Rank) -> Result<(), TransportError> {
        while let Some(piece) = self.passages[to.index()].next() {
            self.member.pass(to, &piece).map_err(|error| failed(&error))?;
        }
        Ok(())
    }

    /// A letter that came, as others read it.
    fn laid_down(&self, from: Rank, letter: &[u8]) -> Result<Buffer, TransportError> {
        let no_memory = || TransportError {
            peer: Some(from),
            problem: format!("no memory for a letter of {} bytes", letter.len()),
        };
        let mut buffer = self.shelf.take(letter.len()).ok_or_else(no_memory)?;
        let bytes = buffer.bytes_mut();
        let (whole, rest) = bytes.split_at_mut(letter.len());
        whole.copy_from_slice(letter);
        rest.fill(0);
        Ok(buffer)
    }
}

impl Transport for ControlTransport {
    fn send(&mut self, to: Rank, letter: &Arc<Letter>) -> Result<(), TransportError> {
        self.passages[to.index()].send(Arc::clone(letter));
        self.pass(to)
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        while let Some((from, piece)) = self.member.take(self.world) {
            // Of a rank of a larger world, as that has it.
            let Some(passage) = self.passages.get_mut(from.index()) else { continue };
            let came = Piece::read(&piece).and_then(|piece| passage.take(&piece));
            let came = came.map_err(|problem| TransportError { peer: Some(from), problem })?;
            self.pass(from)?;
            if let Some(letter) = came {
                return Ok(Some((from, self.laid_down(from, &letter)?)));
            }
        }
        Ok(None)
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        let amid = self.passages.iter().filter(|passage| passage.is_amid()).count();
        Ok(amid + self.passages.iter().map(Passage::waiting).sum::<usize>())
    }

    fn gone(&mut self) -> Result<Vec<Rank>, TransportError> {
        let now = sync::now();
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < PERIOD) {
            return Ok(Vec::new());
        }
        self.looked = Some(now);
        let status = self.member.status();
        match status.ended() {
            Some(error) => Err(failed(error)),
            None => Ok(status.lost()),
        }
    }

    fn close(&mut self, _ended: Option<&Error>) {
        self.member.forget(self.world);
    }
}

fn failed(error: &ControlError) -> TransportError {
    TransportError { peer: None, problem: error.to_string() }
}
