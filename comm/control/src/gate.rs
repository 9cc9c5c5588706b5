//! Accepts connections, and limits the number and the time of those that have not authenticated.
//!
//! CONTROL.md, "Limits".

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{self, Sleep};
use tonic::transport::server::Connected;

/// The time that a connection surely has to authenticate, however many others wait.
const GRACE: Duration = Duration::from_millis(100);

/// The time for the delivery of the last frame.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It has not authenticated.
    Stranger,
    /// It is a member's.
    Admitted,
    /// Its last frame was sent.
    Dismissed,
    /// It ends at the next read.
    Closed,
    /// It has ended.
    Gone,
}

/// A handle of a connection, for code that neither reads nor writes it.
#[derive(Debug)]
pub(crate) struct Ticket {
    from: SocketAddr,
    since: Instant,
    inside: Mutex<(Standing, Option<Waker>)>,
    streams: AtomicUsize,
    gate: Arc<Gate>,
}

impl Ticket {
    pub(crate) fn from(&self) -> SocketAddr {
        self.from
    }

    /// Whether the connection has carried no stream before.
    pub(crate) fn is_first_stream(&self) -> bool {
        self.streams.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Marks the connection as a member's, unless it is closed already.
    pub(crate) fn admit(self: &Arc<Self>) {
        self.change(|old| if old == Standing::Stranger { Standing::Admitted } else { old });
        self.gate.no_stranger(self);
    }

    /// Notes that the last frame was sent. The connection ends by itself, or soon.
    pub(crate) fn dismiss(self: &Arc<Self>) {
        let ended = |old| matches!(old, Standing::Closed | Standing::Gone);
        self.change(|old| if ended(old) { old } else { Standing::Dismissed });
        if !ended(self.inside.lock().0) {
            self.gate.leaving.lock().push(Arc::clone(self));
        }
    }

    fn close(&self) {
        self.change(|_| Standing::Closed);
    }

    /// Changes the state, and wakes the task that reads the connection.
    fn change(&self, new: impl Fn(Standing) -> Standing) {
        let mut inside = self.inside.lock();
        inside.0 = new(inside.0);
        let waker = inside.1.take();
        drop(inside);
        waker.into_iter().for_each(Waker::wake);
    }

    /// The state. `waker` is woken when it changes.
    fn watched_by(&self, waker: &Waker) -> Standing {
        let mut inside = self.inside.lock();
        if !inside.1.as_ref().is_some_and(|old| old.will_wake(waker)) {
            inside.1 = Some(waker.clone());
        }
        inside.0
    }
}

/// Accepts connections.
#[derive(Debug)]
pub(crate) struct Gate {
    most: usize,
    handshake: Duration,
    strangers: Mutex<VecDeque<Arc<Ticket>>>,
    leaving: Mutex<Vec<Arc<Ticket>>>,
}

impl Gate {
    pub(crate) fn new(most: usize, handshake: Duration) -> Arc<Self> {
        let (strangers, leaving) = (Mutex::default(), Mutex::default());
        Arc::new(Self { most, handshake, strangers, leaving })
    }

    /// Whether connections whose last frame was sent are still open.
    pub(crate) fn has_leaving(&self) -> bool {
        !self.leaving.lock().is_empty()
    }

    /// Accepts the next connection that is let in.
    pub(crate) async fn next(self: &Arc<Self>, listener: &TcpListener) -> Passage {
        let mut warned = false;
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    if let Some(passage) = self.let_in(stream, from) {
                        return passage;
                    }
                }
                // For example too many open files: others may be closed.
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(%error, "connections cannot be accepted: they wait");
                    }
                    time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    fn let_in(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) -> Option<Passage> {
        stream.set_nodelay(true).ok()?;
        let mut strangers = self.strangers.lock();
        if strangers.len() >= self.most {
            let oldest = strangers.front()?;
            if oldest.since.elapsed() < GRACE {
                return None;
            }
            oldest.close();
            strangers.pop_front();
        }
        let inside = Mutex::new((Standing::Stranger, None));
        let (since, streams, gate) = (Instant::now(), AtomicUsize::new(0), Arc::clone(self));
        let ticket = Arc::new(Ticket { from, since, inside, streams, gate });
        strangers.push_back(Arc::clone(&ticket));
        drop(strangers);
        let until = Box::pin(time::sleep(self.handshake));
        Some(Passage { stream, ticket, until, ending: Ending::Handshake })
    }

    fn no_stranger(&self, ticket: &Arc<Ticket>) {
        self.strangers.lock().retain(|other| !Arc::ptr_eq(other, ticket));
    }
}

/// The stream of a connection. It ends when its [`Ticket`] says so, or if it does not authenticate in time.
#[derive(Debug)]
pub(crate) struct Passage {
    stream: TcpStream,
    ticket: Arc<Ticket>,
    until: Pin<Box<Sleep>>,
    ending: Ending,
}

/// The purpose of a connection's time limit.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    Handshake,
    LastWords,
}

impl Passage {
    fn look(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let too_late = match self.ticket.watched_by(context.waker()) {
            Standing::Closed | Standing::Gone => true,
            Standing::Stranger => self.until.as_mut().poll(context).is_ready(),
            Standing::Admitted => false,
            Standing::Dismissed => {
                if self.ending == Ending::Handshake {
                    self.ending = Ending::LastWords;
                    self.until.as_mut().reset(time::Instant::now() + LAST_WORDS);
                }
                self.until.as_mut().poll(context).is_ready()
            }
        };
        if too_late { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.ticket.change(|_| Standing::Gone);
        let gate = &self.ticket.gate;
        gate.no_stranger(&self.ticket);
        gate.leaving.lock().retain(|other| !Arc::ptr_eq(other, &self.ticket));
    }
}

impl Connected for Passage {
    type ConnectInfo = Arc<Ticket>;

    fn connect_info(&self) -> Arc<Ticket> {
        Arc::clone(&self.ticket)
    }
}

impl AsyncRead for Passage {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.look(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Passage {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
