//! The flight records of a world's ranks. The recorder and its records are in `hsdp-flight`; `flight/FLIGHT.md`.

use std::path::Path;
use std::sync::Arc;

use hsdp_flight::FlightRecord;
use hsdp_sharding::Rank;

use crate::engine::{Record, Status};
use crate::sync::atomic::{AtomicBool, Ordering};

/// The record of rank `rank` of `size`.
pub(crate) fn record_of(
    (rank, size): (Rank, usize),
    record: &Record,
    status: &Status,
) -> FlightRecord {
    let end = status.world_end().map(|end| end.to_string());
    let taken = record.flight.record(rank, size);
    FlightRecord { step: record.step(), epoch: record.epoch(), end, ..taken }
}

/// The writer of the record of a rank whose world has ended early: it outlives the rank.
#[derive(Debug)]
pub(crate) struct Dump {
    folder: Option<Arc<Path>>,
    rank: Rank,
    size: usize,
    record: Arc<Record>,
    status: Arc<Status>,
    written: AtomicBool,
}

impl Dump {
    pub(crate) fn of(
        (rank, size): (Rank, usize),
        record: &Arc<Record>,
        status: &Arc<Status>,
        folder: Option<Arc<Path>>,
    ) -> Self {
        let (record, status) = (Arc::clone(record), Arc::clone(status));
        Self { folder, rank, size, record, status, written: AtomicBool::new(false) }
    }

    /// Writes the record if the world has ended early, once.
    pub(crate) fn if_ended(&self) {
        let Some(folder) = &self.folder else { return };
        if self.status.world_end().is_none() || self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        let record = record_of((self.rank, self.size), &self.record, &self.status);
        let rank = self.rank.get();
        match record.write_to(folder) {
            Ok(path) => tracing::info!(rank, path = %path.display(), "flight record written"),
            Err(error) => {
                tracing::warn!(rank, folder = %folder.display(), %error, "the flight record could not be written");
            }
        }
    }
}
