//! The time for which something of NCCL is waited for.

use std::time::{Duration, Instant};

/// The longest time to wait.
pub(crate) struct Patience<'a> {
    pub(crate) limit: Duration,
    /// Whether waiting is of no use any more.
    ended: &'a dyn Fn() -> bool,
}

impl<'a> Patience<'a> {
    pub(crate) fn of(limit: Duration) -> Self {
        Self { limit, ended: &|| false }
    }

    /// So long, but no longer than until `ended`.
    pub(crate) fn until(limit: Duration, ended: &'a dyn Fn() -> bool) -> Self {
        Self { limit, ended }
    }

    pub(crate) fn is_over(&self, began: Instant) -> bool {
        began.elapsed() >= self.limit || (self.ended)()
    }
}
