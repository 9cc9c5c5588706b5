//! Page-locked host memory, through which elements are copied to and from a device.
//!
//! With ordinary memory the driver would copy through its own page-locked memory, and block until the stream gets there.

use std::slice;

use parking_lot::Mutex;

use super::device::{Device, Handle};
use super::error::CudaError;
use super::event::Moment;

/// The spare pieces of a device, each with the end of its last copy.
#[derive(Debug, Default)]
pub(super) struct Stagings(Mutex<Vec<(Piece, Option<Moment>)>>);

/// Page-locked bytes.
#[derive(Debug)]
struct Piece {
    start: Handle<*mut u8>,
    len: usize,
}

/// Page-locked bytes that one copy uses.
#[derive(Debug)]
pub(super) struct Staging {
    device: Device,
    /// `Some` until it is dropped.
    piece: Option<Piece>,
    /// The end of the copy, if the host does not wait for it.
    until: Option<Moment>,
}

impl Staging {
    /// Takes a piece of at least `len` bytes that no copy uses.
    pub(super) fn take(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.make_current()?;
        let piece = device.shared().stagings.spare(len)?;
        let piece = piece.map_or_else(|| Piece::new(device, len), Ok)?;
        Ok(Self { device: device.clone(), piece: Some(piece), until: None })
    }

    /// The bytes.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let Piece { start, len } = self.piece.as_ref().expect("present until it is dropped");
        // SAFETY: CU-6, the piece is page-locked memory of this length, zeroed when it was made, and this is its only owner.
        unsafe { slice::from_raw_parts_mut(start.0, *len) }
    }

    /// Returns the piece, which is in use until `moment`.
    pub(super) fn until(mut self, moment: Moment) {
        self.until = Some(moment);
    }

    /// Leaks the piece, because a copy that was not done in time may still write it.
    pub(super) fn leak(mut self) {
        self.piece = None;
    }
}

impl Piece {
    fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        let len = len.max(4096).next_power_of_two();
        let start = device.context().lock_pages(len)?;
        // SAFETY: CU-6, there are `len` bytes from `start`, and they have no other user.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { start: Handle(start), len })
    }
}

impl Stagings {
    /// The smallest spare piece that is large enough and not in use.
    fn spare(&self, len: usize) -> Result<Option<Piece>, CudaError> {
        let mut spare = self.0.lock();
        let mut found: Option<usize> = None;
        for (index, (piece, until)) in spare.iter().enumerate() {
            let is_better = found.is_none_or(|other| piece.len < spare[other].0.len);
            if piece.len >= len && is_better && until.as_ref().map_or(Ok(true), Moment::has_come)? {
                found = Some(index);
            }
        }
        Ok(found.map(|index| spare.swap_remove(index).0))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.device.shared().stagings.0.lock().push((piece, self.until.take()));
        }
    }
}
