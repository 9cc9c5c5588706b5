//! Connections: how many of which nobody knows whose they are, for how long, and how each of them is ended.
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

/// How long a stranger has its place for certain.
const GRACE: Duration = Duration::from_millis(100);

/// How long the last frame has to get through.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Nobody knows whose.
    Stranger,
    /// A member's.
    Admitted,
    /// It has been told its last word.
    Dismissed,
    /// It ends as soon as somebody looks.
    Closed,
    /// It has ended.
    Gone,
}

/// A connection, for who does not read or write it.
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

    /// Whether it has carried no stream before.
    pub(crate) fn is_first_stream(&self) -> bool {
        self.streams.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// It is a member's from now on; not if it is closed already.
    pub(crate) fn admit(self: &Arc<Self>) {
        self.change(|old| if old == Standing::Stranger { Standing::Admitted } else { old });
        self.gate.no_stranger(self);
    }

    /// It has been told its last word: it ends by itself, or soon.
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

    /// Becomes something else, and has whoever reads the connection look at it.
    fn change(&self, new: impl Fn(Standing) -> Standing) {
        let mut inside = self.inside.lock();
        inside.0 = new(inside.0);
        let waker = inside.1.take();
        drop(inside);
        waker.into_iter().for_each(Waker::wake);
    }

    /// What it is, and who has to be woken when that changes.
    fn watched_by(&self, waker: &Waker) -> Standing {
        let mut inside = self.inside.lock();
        if !inside.1.as_ref().is_some_and(|old| old.will_wake(waker)) {
            inside.1 = Some(waker.clone());
        }
        inside.0
    }
}

/// Where connections come in.
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

    /// Whether connections that were told their last word are still there.
    pub(crate) fn has_leaving(&self) -> bool {
        !self.leaving.lock().is_empty()
    }

    /// The next connection that may stay.
    pub(crate) async fn next(self: &Arc<Self>, listener: &TcpListener) -> Passage {
        let mut warned = false;
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    if let Some(passage) = self.let_in(stream, from) {
                        return passage;
                    }
                }
                // Too many open files, say: others may close some.
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

/// A connection that ends when its ticket says so, or if it is a stranger's for too long.
#[derive(Debug)]
pub(crate) struct Passage {
    stream: TcpStream,
    ticket: Arc<Ticket>,
    until: Pin<Box<Sleep>>,
    ending: Ending,
}

/// What the time is for that a connection has.
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
