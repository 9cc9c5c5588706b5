//! The flight records of a world's ranks. The recorder and its records are in `hsdp-flight`;
//! `flight/FLIGHT.md`.

use std::path::Path;
use std::sync::Arc;

use hsdp_flight::FlightRecord;
use hsdp_sharding::Rank;

use crate::engine::{EarlyEnds, Record};
use crate::handle::RankHandle;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::threads::OwnRank;

/// A rank's record, and its writer if the world ends early: it outlives the rank.
#[derive(Debug)]
pub(crate) struct Dump {
    folder: Option<Arc<Path>>,
    rank: Rank,
    size: usize,
    record: Arc<Record>,
    early_ends: Arc<EarlyEnds>,
    written: AtomicBool,
}

impl Dump {
    pub(crate) fn of(handle: &RankHandle, folder: Option<Arc<Path>>) -> Self {
        let OwnRank { rank, record, core } = &*handle.own;
        Self {
            folder,
            rank: *rank,
            size: handle.size,
            record: Arc::clone(record),
            early_ends: Arc::clone(&core.state.early_ends),
            written: AtomicBool::new(false),
        }
    }

    /// The record as it is now.
    pub(crate) fn record(&self) -> FlightRecord {
        let end = self.early_ends.world_end().map(|end| end.to_string());
        let taken = self.record.flight.record(self.rank, self.size);
        FlightRecord { step: self.record.step(), epoch: self.record.epoch(), end, ..taken }
    }

    /// Writes the record if the world has ended early, once.
    pub(crate) fn if_ended(&self) {
        let Some(folder) = &self.folder else { return };
        if self.early_ends.world_end().is_none() || self.written.swap(true, Ordering::Relaxed) {
            return;
        }
        let rank = self.rank.get();
        match self.record().write_to(folder) {
            Ok(path) => tracing::info!(rank, path = %path.display(), "flight record written"),
            Err(error) => {
                hsdp_warnings::warn!(rank, folder = %folder.display(), %error, "the flight record could not be written");
            }
        }
    }
}
