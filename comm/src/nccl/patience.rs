//! For how long something of NCCL is waited for.

use std::time::{Duration, Instant};

/// For how long to wait at the most.
pub(super) struct Patience<'a> {
    pub(super) limit: Duration,
    /// Whether waiting is of no use any more.
    ended: &'a dyn Fn() -> bool,
}

impl<'a> Patience<'a> {
    pub(super) fn of(limit: Duration) -> Self {
        Self { limit, ended: &|| false }
    }

    /// So long, but no longer than until `ended`.
    pub(super) fn until(limit: Duration, ended: &'a dyn Fn() -> bool) -> Self {
        Self { limit, ended }
    }

    pub(super) fn is_over(&self, began: Instant) -> bool {
        began.elapsed() >= self.limit || (self.ended)()
    }
}
