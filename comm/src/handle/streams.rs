//! The streams of a rank.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, Device, Stream};

use crate::Channel;
use crate::sync::Mutex;

/// Streams by the ordinal of their device and by channel: gathers run ahead of reductions, and
/// neither waits for the all-reduces.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<HashMap<(usize, Channel), Arc<Stream>>>);

impl Streams {
    /// Returns the stream of a channel, and makes it on first use.
    pub(crate) fn of(&self, device: &Device, channel: Channel) -> Result<Arc<Stream>, CudaError> {
        match self.0.lock().entry((device.ordinal(), channel)) {
            Entry::Occupied(stream) => Ok(Arc::clone(stream.get())),
            Entry::Vacant(entry) => Ok(Arc::clone(entry.insert(Arc::new(device.stream()?)))),
        }
    }
}
