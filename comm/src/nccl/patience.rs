//! The time for which something of NCCL is waited for.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest time to wait.
#[derive(Clone)]
pub struct Patience {
    pub(super) limit: Duration,
    ended: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Patience {
    /// So long, but no longer than until waiting `ended` to be of use.
    pub fn until(limit: Duration, ended: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { limit, ended: Arc::new(ended) }
    }

    pub(super) fn is_over(&self, began: Instant) -> bool {
        began.elapsed() >= self.limit || (self.ended)()
    }
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience").field("limit", &self.limit).finish_non_exhaustive()
    }
}
