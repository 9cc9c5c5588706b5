//! Limits the number and the time of connections that have not authenticated.
//!
//! CONTROL.md, "Limits".

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{self, Instant};

/// The time that a connection surely has to authenticate, however many others wait.
const GRACE: Duration = Duration::from_millis(100);

/// The time for the delivery of the last frame.
const LAST_FRAME: Duration = Duration::from_secs(1);

/// The open connections.
#[derive(Debug)]
pub(crate) struct Connections {
    most: usize,
    handshake: Duration,
    /// The connections that have not authenticated, the oldest first.
    unauthenticated: Mutex<VecDeque<Arc<AcceptedConnection>>>,
    open: AtomicUsize,
}

/// A connection. The task that serves it has it until its end.
#[derive(Debug)]
pub(crate) struct AcceptedConnection {
    pub(crate) from: SocketAddr,
    since: Instant,
    /// The time at which it ends at the latest; `None` while it serves a member.
    until: watch::Sender<Option<Instant>>,
    connections: Arc<Connections>,
}

impl Connections {
    /// At most `most` connections that have not authenticated, each for at most `handshake`.
    pub(crate) fn new(most: usize, handshake: Duration) -> Arc<Self> {
        let unauthenticated = Mutex::default();
        let open = AtomicUsize::new(0);
        Arc::new(Self { most, handshake, unauthenticated, open })
    }

    /// The number of open connections that have authenticated or were refused.
    pub(crate) fn known(&self) -> usize {
        self.open.load(Ordering::Relaxed).saturating_sub(self.unauthenticated.lock().len())
    }

    /// A new connection, if it is within the limits. The caller [serves](AcceptedConnection::serve) it.
    pub(crate) fn admit(self: &Arc<Self>, from: SocketAddr) -> Option<Arc<AcceptedConnection>> {
        let mut unauthenticated = self.unauthenticated.lock();
        if unauthenticated.len() >= self.most {
            if unauthenticated.front()?.since.elapsed() < GRACE {
                return None;
            }
            unauthenticated.pop_front()?.until.send_replace(Some(Instant::now()));
        }
        let since = Instant::now();
        let until = watch::Sender::new(Some(since + self.handshake));
        let connection =
            Arc::new(AcceptedConnection { from, since, until, connections: Arc::clone(self) });
        unauthenticated.push_back(Arc::clone(&connection));
        self.open.fetch_add(1, Ordering::Relaxed);
        Some(connection)
    }
}

impl AcceptedConnection {
    /// Serves the connection until its end, or until its time is up.
    pub(crate) async fn serve(&self, served: impl Future) {
        tokio::select! {
            _ = served => {}
            () = self.time_is_up() => {}
        }
        self.leave_unauthenticated();
        self.connections.open.fetch_sub(1, Ordering::Relaxed);
    }

    async fn time_is_up(&self) {
        let mut until = self.until.subscribe();
        loop {
            let end = *until.borrow_and_update();
            let end = async {
                time::sleep_until(end?).await;
                Some(())
            };
            tokio::select! {
                Some(()) = end => return,
                _ = until.changed() => {}
            }
        }
    }

    /// Ends the limits on connections that have not authenticated.
    pub(crate) fn authenticated(&self) {
        self.until.send_replace(None);
        self.leave_unauthenticated();
    }

    /// Notes that the last frame was sent. The connection ends by itself, or soon.
    pub(crate) fn sent_last(&self) {
        self.until.send_replace(Some(Instant::now() + LAST_FRAME));
        self.leave_unauthenticated();
    }

    fn leave_unauthenticated(&self) {
        self.connections.unauthenticated.lock().retain(|other| !std::ptr::eq(&**other, self));
    }
}
