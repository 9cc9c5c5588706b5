//! Buffers that are lent to an operation and come back, whatever becomes of it.
//!
//! The operation owns the buffer, so no thread writes it when the caller has it again. When the
//! operation drops the buffer, on whichever thread, it returns to the caller's [`Lease`].

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{Alarm, WaitClock, from_now};
use crate::sync::{Condvar, Mutex};

/// The returned buffer, for the caller to take.
struct Home<B> {
    returned: Mutex<Option<B>>,
    changed: Condvar,
}

/// A buffer that an operation owns. It returns to its [`Lease`], if it has one, when this is
/// dropped.
pub(crate) struct Leased<B> {
    /// `Some` until this is dropped.
    buffer: Option<B>,
    /// `None` if no caller has a claim to the buffer.
    home: Option<Arc<Home<B>>>,
}

/// The caller's claim to a buffer that it has lent.
pub(crate) struct Lease<B>(Arc<Home<B>>);

/// Lends a buffer.
pub(crate) fn lend<B>(buffer: B) -> (Leased<B>, Lease<B>) {
    let home = Arc::new(Home { returned: Mutex::new(None), changed: Condvar::new() });
    (Leased { buffer: Some(buffer), home: Some(Arc::clone(&home)) }, Lease(home))
}

impl<B> Lease<B> {
    /// Takes the buffer, if it has returned.
    pub(crate) fn take(&self) -> Option<B> {
        self.0.returned.lock().take()
    }

    /// Waits until the buffer returns, for `deadline` at the most, and takes it.
    pub(crate) fn wait(&self, deadline: Duration) -> Option<B> {
        self.wait_by(WaitClock::until(deadline))
    }

    fn wait_by(&self, mut clock: WaitClock) -> Option<B> {
        loop {
            // Without the lock: it may warn, and a subscriber of warnings may run any code.
            let alarm = clock.alarm();
            let mut returned = self.0.returned.lock();
            match alarm {
                Alarm::None(rest) if returned.is_none() => {
                    self.0.changed.wait_until(&mut returned, from_now(rest));
                }
                _ => return returned.take(),
            }
        }
    }
}

impl<B> Leased<B> {
    /// Takes the buffer for good: it does not return to the lease.
    pub(crate) fn keep(mut self) -> B {
        self.buffer.take().expect("there until it is dropped")
    }
}

/// A buffer without a claim. It needs neither an allocation nor a lock.
impl<B> From<B> for Leased<B> {
    fn from(buffer: B) -> Self {
        Self { buffer: Some(buffer), home: None }
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
        if let (Some(buffer), Some(home)) = (self.buffer.take(), &self.home) {
            *home.returned.lock() = Some(buffer);
            home.changed.notify_all();
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::thread;

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::sync::atomic::{AtomicUsize, Ordering};

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
        let leased = Leased::from(Arc::clone(&alive));
        assert!(leased.home.is_none(), "it has no place to return to");
        drop(leased);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    /// A subscriber that drops a buffer that is lent, as any code may.
    struct Returning {
        home: Arc<Home<u8>>,
        leased: Mutex<Option<Leased<u8>>>,
        /// Number of warnings so far.
        warnings: Arc<AtomicUsize>,
    }

    impl Subscriber for Returning {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.is_event()
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            let is_locked = self.home.returned.try_lock().is_none();
            assert!(!is_locked, "the buffer could not return: this thread would wait for itself");
            drop(self.leased.lock().take());
            self.warnings.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_subscriber_that_drops_the_buffer_while_the_clock_warns_does_not_block() {
        let clock = WaitClock::until(Duration::from_secs(60));
        // Long enough for the clock to find that the process was stopped.
        let stopped = clock.waited() + Duration::from_millis(600);
        while clock.waited() < stopped {
            thread::park_timeout(stopped);
        }
        let (leased, lease) = lend(7);
        let warnings = Arc::new(AtomicUsize::new(0));
        let subscriber = Returning {
            home: Arc::clone(&lease.0),
            leased: Mutex::new(Some(leased)),
            warnings: Arc::clone(&warnings),
        };
        let returned = tracing::subscriber::with_default(subscriber, || lease.wait_by(clock));
        assert_eq!(returned, Some(7));
        assert_eq!(warnings.load(Ordering::Relaxed), 1, "the clock has warned");
    }
}
