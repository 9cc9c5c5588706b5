//! The streams of a rank.

use std::sync::Arc;

use hsdp_kernels::cuda::{CudaError, Device, Stream};

use crate::Channel;
use crate::sync::Mutex;

/// A stream for each channel and device: gathers run ahead of reductions, and neither waits for the all-reduces.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<Vec<(usize, Channel, Arc<Stream>)>>);

impl Streams {
    /// The stream of a channel, made when it is first asked for.
    pub(crate) fn of(&self, device: &Device, channel: Channel) -> Result<Arc<Stream>, CudaError> {
        let mut streams = self.0.lock();
        let is_it = |(ordinal, of, _): &&(usize, Channel, Arc<Stream>)| {
            *ordinal == device.ordinal() && *of == channel
        };
        if let Some((_, _, stream)) = streams.iter().find(is_it) {
            return Ok(Arc::clone(stream));
        }
        let stream = Arc::new(device.stream()?);
        streams.push((device.ordinal(), channel, Arc::clone(&stream)));
        Ok(stream)
    }
}
