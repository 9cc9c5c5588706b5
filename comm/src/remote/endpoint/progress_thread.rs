//! The thread that sends and receives for a rank, unless a thread that waits does. `REMOTE.md`, "Progress".

use std::sync::Arc;
use std::time::Duration;

use super::{Endpoint, FIRST_NAP, NAPS};
use crate::engine::from_now;
use crate::remote::progress::ProgressTurn;

/// The longest that it sleeps where it is woken for messages: it looks for lost ranks, and for contributions that wait.
const SLEEP: Duration = Duration::from_millis(25);

impl Endpoint {
    pub(super) fn run(self: &Arc<Self>) {
        let mut nap = FIRST_NAP;
        let is_woken = self.listen();
        loop {
            let turned = self.progress.lock().turn(self);
            let longest = match turned {
                ProgressTurn::Something => {
                    nap = FIRST_NAP;
                    continue;
                }
                _ if self.has_given_up() => return,
                ProgressTurn::Awaits | ProgressTurn::Idle if self.is_closed() => return,
                ProgressTurn::Sends => FIRST_NAP,
                ProgressTurn::Relays | ProgressTurn::Awaits => NAPS[0],
                ProgressTurn::Idle => NAPS[1],
            };
            match turned {
                ProgressTurn::Awaits | ProgressTurn::Idle if is_woken => self.sleep_until_called(),
                _ => {
                    nap = nap.min(longest);
                    self.sleep(nap);
                    nap = (2 * nap).min(longest);
                }
            }
        }
    }

    /// Has the transport wake the progress engine, if it can; whether it can.
    fn listen(self: &Arc<Self>) -> bool {
        let endpoint = Arc::downgrade(self);
        let call = move || endpoint.upgrade().into_iter().for_each(|endpoint| endpoint.call());
        self.progress.lock().transport.wake_by(Box::new(call))
    }

    /// Something has come.
    fn call(&self) {
        self.outgoing.lock().is_called = true;
        self.changed.notify_all();
    }

    /// Sleeps until something is to be done, or has come since the turn before the last sleep.
    fn sleep_until_called(&self) {
        let mut outgoing = self.outgoing.lock();
        if !outgoing.is_called && outgoing.requests.is_empty() {
            self.changed.wait_until(&mut outgoing, from_now(SLEEP));
        }
        outgoing.is_called = false;
    }

    /// Whether only threads that wait send and receive.
    pub(crate) fn is_left_alone(&self) -> bool {
        self.thread.lock().is_none()
    }

    /// Until there is something to be done, or so long.
    pub(super) fn sleep(&self, nap: Duration) {
        let mut outgoing = self.outgoing.lock();
        if outgoing.requests.is_empty() {
            self.changed.wait_until(&mut outgoing, from_now(nap));
        }
    }
}
