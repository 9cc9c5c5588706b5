//! Limits the number and the time of connections that have not authenticated.
//!
//! CONTROL.md, "Limits".

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time;

/// The time that a connection surely has to authenticate, however many others wait.
const GRACE: Duration = Duration::from_millis(100);

/// The time for the delivery of the last frame.
const LAST_FRAME: Duration = Duration::from_secs(1);

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has not authenticated.
    Unauthenticated,
    /// It has authenticated.
    Authenticated,
    /// Its last frame was sent.
    Leaving,
    /// Another connection has its place.
    Replaced,
}

/// The open connections.
#[derive(Debug)]
pub(crate) struct Connections {
    most: usize,
    handshake: Duration,
    /// The connections that have not authenticated, the oldest first.
    unauthenticated: Mutex<VecDeque<Arc<Connection>>>,
    open: AtomicUsize,
}

/// A connection. The task that serves it has it until its end.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) from: SocketAddr,
    since: Instant,
    phase: watch::Sender<Phase>,
    connections: Arc<Connections>,
}

impl Connections {
    /// At most `most` connections that have not authenticated, each for at most `handshake`.
    pub(crate) fn new(most: usize, handshake: Duration) -> Arc<Self> {
        let (unauthenticated, open) = (Mutex::default(), AtomicUsize::new(0));
        Arc::new(Self { most, handshake, unauthenticated, open })
    }

    /// The number of open connections that have authenticated or were refused.
    pub(crate) fn known(&self) -> usize {
        self.open.load(Ordering::Relaxed).saturating_sub(self.unauthenticated.lock().len())
    }

    /// A new connection, if it is within the limits. The caller [serves](Connection::serve) it.
    pub(crate) fn admit(self: &Arc<Self>, from: SocketAddr) -> Option<Arc<Connection>> {
        let mut unauthenticated = self.unauthenticated.lock();
        if unauthenticated.len() >= self.most {
            if unauthenticated.front()?.since.elapsed() < GRACE {
                return None;
            }
            unauthenticated.pop_front()?.phase.send_replace(Phase::Replaced);
        }
        let (since, phase) = (Instant::now(), watch::Sender::new(Phase::Unauthenticated));
        let connection = Connection { from, since, phase, connections: Arc::clone(self) };
        let connection = Arc::new(connection);
        unauthenticated.push_back(Arc::clone(&connection));
        self.open.fetch_add(1, Ordering::Relaxed);
        Some(connection)
    }
}

impl Connection {
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
        let mut phase = self.phase.subscribe();
        let authenticated = phase.wait_for(|phase| *phase != Phase::Unauthenticated);
        if time::timeout(self.connections.handshake, authenticated).await.is_err() {
            return;
        }
        let ends = |phase: &Phase| matches!(phase, Phase::Leaving | Phase::Replaced);
        if phase.wait_for(ends).await.is_ok_and(|phase| *phase == Phase::Leaving) {
            time::sleep(LAST_FRAME).await;
        }
    }

    /// Ends the limits on connections that have not authenticated.
    pub(crate) fn authenticated(&self) {
        self.phase.send_if_modified(|phase| {
            let is_new = *phase == Phase::Unauthenticated;
            *phase = if is_new { Phase::Authenticated } else { *phase };
            is_new
        });
        self.leave_unauthenticated();
    }

    /// Notes that the last frame was sent. The connection ends by itself, or soon.
    pub(crate) fn sent_last(&self) {
        self.phase.send_replace(Phase::Leaving);
        self.leave_unauthenticated();
    }

    fn leave_unauthenticated(&self) {
        self.connections.unauthenticated.lock().retain(|other| !std::ptr::eq(&**other, self));
    }
}
