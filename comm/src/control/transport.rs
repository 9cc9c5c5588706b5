//! Messages by the control plane.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hsdp_sharding::Rank;

use super::losses::{COORDINATOR, end_of, losses_of};
use super::member::ControlMember;
use crate::remote::{
    Answer, Buffer, BufferPool, Cause, PeerLoss, RankMessage, Transport, TransportError, Waker,
    copied,
};
use crate::{Error, SetupError, sync};

/// The time between two looks at the other ranks.
const PERIOD: Duration = Duration::from_millis(100);

/// How long a coordinator that runs may take to answer, at most.
const ANSWER: Duration = Duration::from_millis(500);

/// The messages of one world.
pub(super) struct ControlTransport {
    member: Arc<ControlMember>,
    world: u32,
    pool: Arc<BufferPool>,
    looked: Option<Instant>,
    /// When the coordinator was asked for an answer that is awaited.
    asked: Option<Instant>,
}

impl ControlTransport {
    pub(super) fn new(member: Arc<ControlMember>) -> Self {
        let world = member.next_world();
        Self { member, world, pool: Arc::default(), looked: None, asked: None }
    }
}

impl Transport for ControlTransport {
    fn send(&mut self, to: &[Rank], message: &Arc<RankMessage>) -> Result<(), TransportError> {
        self.member.send(self.world, to, message)
    }

    fn wake_by(&mut self, waker: Waker) -> bool {
        self.member.wake_by(self.world, waker);
        true
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        let Some((from, message)) = self.member.take(self.world)? else { return Ok(None) };
        copied(&self.pool, from, &message).map(|buffer| Some((from, buffer)))
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        Ok(self.member.under_way(self.world))
    }

    fn lost(&mut self) -> Result<Vec<PeerLoss>, PeerLoss> {
        let now = sync::now();
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < PERIOD) {
            return Ok(Vec::new());
        }
        self.looked = Some(now);
        let status = self.member.status();
        match &status.ended {
            Some(error) => Err(end_of(self.member.rank(), error)),
            None => Ok(losses_of(&status)),
        }
    }

    fn is_forwarded(&self) -> bool {
        true
    }

    fn forwarder(&mut self) -> Answer {
        let asked = *self.asked.get_or_insert_with(|| {
            self.member.ask();
            sync::now()
        });
        let since = sync::now().saturating_duration_since(asked);
        let silence = self.member.silence();
        if since < ANSWER && silence >= since {
            return Answer::Awaited;
        }
        // The next call asks anew.
        self.asked = None;
        if silence < since {
            return Answer::Heard;
        }
        let millis = Duration::from_millis(u64::try_from(silence.as_millis()).unwrap_or(u64::MAX));
        let own = self.member.rank();
        let problem = format!("rank {own} has heard nothing from its coordinator for {millis:?}");
        Answer::Silent(PeerLoss { rank: COORDINATOR, cause: Cause::Unreachable(problem) })
    }

    fn close(&mut self, ended: Option<&Error>) {
        if matches!(ended, Some(Error::Setup(SetupError::Incomplete { .. }))) {
            self.member.fail();
        }
        self.member.forget(self.world);
    }
}
