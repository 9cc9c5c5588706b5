//! Buffers that are lent to an operation and come back, whatever becomes of it.
//!
//! The operation owns the buffer, so no thread writes it when the caller has it again. When the
//! operation drops the buffer, on whichever thread, it returns to the caller's [`Lease`].

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{Alarm, WaitClock, from_now};
use crate::sync::{Condvar, Mutex};

/// The place to which a buffer returns.
struct Home<B> {
    returned: Mutex<Option<B>>,
    changed: Condvar,
}

/// A buffer that an operation owns. It returns to its [`Lease`] when this is dropped.
pub(crate) struct Leased<B> {
    /// `Some` until this is dropped.
    buffer: Option<B>,
    home: Arc<Home<B>>,
}

/// The caller's claim to a buffer that it has lent.
pub(crate) struct Lease<B>(Arc<Home<B>>);

/// Lends a buffer.
pub(crate) fn lend<B>(buffer: B) -> (Leased<B>, Lease<B>) {
    let home = Arc::new(Home { returned: Mutex::new(None), changed: Condvar::new() });
    (Leased { buffer: Some(buffer), home: Arc::clone(&home) }, Lease(home))
}

impl<B> Lease<B> {
    /// Takes the buffer, if it has returned.
    pub(crate) fn take(&self) -> Option<B> {
        self.0.returned.lock().take()
    }

    /// Waits until the buffer returns, for `deadline` at the most, and takes it.
    pub(crate) fn wait(&self, deadline: Duration) -> Option<B> {
        let mut clock = WaitClock::until(deadline);
        let mut returned = self.0.returned.lock();
        while returned.is_none() {
            let Alarm::None(rest) = clock.alarm() else { break };
            self.0.changed.wait_until(&mut returned, from_now(rest));
        }
        returned.take()
    }
}

impl<B> Leased<B> {
    /// Takes the buffer for good: it does not return to the lease.
    pub(crate) fn keep(mut self) -> B {
        self.buffer.take().expect("there until it is dropped")
    }
}

/// A buffer to which no caller has a claim.
impl<B> From<B> for Leased<B> {
    fn from(buffer: B) -> Self {
        lend(buffer).0
    }
}

impl<B> Deref for Leased<B> {
    type Target = B;

    fn deref(&self) -> &B {
        self.buffer.as_ref().expect("there until it is dropped")
    }
}

impl<B> DerefMut for Leased<B> {
    fn deref_mut(&mut self) -> &mut B {
        self.buffer.as_mut().expect("there until it is dropped")
    }
}

impl<B> Drop for Leased<B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            *self.home.returned.lock() = Some(buffer);
            self.home.changed.notify_all();
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_buffer_comes_back_when_the_operation_lets_go_of_it() {
        let (mut leased, lease) = lend(vec![1, 2]);
        leased.push(3);
        assert_eq!(lease.take(), None);
        assert_eq!(lease.wait(Duration::from_millis(20)), None, "it is in use");
        let worker = thread::spawn(move || {
            thread::park_timeout(Duration::from_millis(50));
            drop(leased);
        });
        assert_eq!(lease.wait(Duration::from_secs(60)), Some(vec![1, 2, 3]));
        worker.join().expect("no panic");
        assert_eq!(lease.take(), None, "it came back once");
    }

    #[test]
    fn a_buffer_that_is_kept_does_not_come_back() {
        let (leased, lease) = lend(7);
        assert_eq!(leased.keep(), 7);
        assert_eq!(lease.take(), None);
    }

    #[test]
    fn a_buffer_without_a_claim_is_dropped() {
        let alive = Arc::new(());
        drop(Leased::from(Arc::clone(&alive)));
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
