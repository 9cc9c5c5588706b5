mod beyond;
mod greeting;
mod stalls;

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{panic, thread};

use hsdp_sharding::Rank;

use super::*;
use crate::WorldError::Aborted;
use crate::call::barrier_of;
use crate::engine::from_now;
use crate::remote::buffer::Buffer;
use crate::remote::progress;
use crate::remote::transport::{Answer, Cause, PeerLoss, TransportError};
use crate::threads::Core;
use crate::{AbortReason, Channel, Counts, GroupId, Op, Pending, Tag, World, WorldOptions, remote};

/// The others say nothing, and never take so many messages.
#[derive(Default)]
struct Silent {
    under_way: usize,
    /// The reports of the transport: a rank that it has lost, and the rank that forwards all
    /// messages and does not answer.
    lost: Option<PeerLoss>,
    silent: Option<PeerLoss>,
    /// There as long as this is.
    _held: Arc<()>,
}

impl Transport for Silent {
    fn send(&mut self, _: &[Rank], _: &Arc<RankMessage>) -> Result<(), TransportError> {
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        Ok(None)
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        Ok(self.under_way)
    }

    fn lost(&mut self) -> Result<Vec<PeerLoss>, PeerLoss> {
        Ok(self.lost.iter().cloned().collect())
    }

    fn forwarder(&mut self) -> Answer {
        self.silent.clone().map_or(Answer::Heard, Answer::Silent)
    }

    fn close(&mut self, _: Option<&Error>) {}
}

fn loss(rank: usize, cause: Cause) -> PeerLoss {
    PeerLoss { rank: Rank::new(rank), cause }
}

/// The rank that the world's end names, and the reason, after as many turns as that takes.
fn end_after_turns(core: &Core, endpoint: &Endpoint) -> (Rank, AbortReason) {
    let until = from_now(Duration::from_secs(30));
    while Instant::now() < until {
        let _ = endpoint.hear();
        if let Some(Error::World(Aborted { rank, reason, .. })) = core.state.early_ends.world_end()
        {
            return (rank, reason);
        }
        thread::yield_now();
    }
    panic!("the world has not ended");
}

/// Of three ranks, the first.
fn opened(transport: Silent) -> (Arc<Core>, Arc<Endpoint>) {
    opened_by(0, transport)
}

fn opened_by(rank: usize, transport: Silent) -> (Arc<Core>, Arc<Endpoint>) {
    let core = Core::new(3, WorldOptions::default());
    let asked = Asked { size: 3, processes: 3 };
    let endpoint = Endpoint::new(&core.state, Rank::new(rank), asked, Box::new(transport));
    core.open_endpoint(Arc::clone(&endpoint));
    (core, endpoint)
}

fn gone() -> Error {
    Error::StepAborted {
        rank: Rank::new(1),
        step: 0,
        reason: "stands for an end".into(),
        mistake: None,
    }
}

/// The messages that are to be sent.
fn messages(endpoint: &Endpoint) -> Vec<MessageKind> {
    let kind = |request: EndpointRequest| match request {
        EndpointRequest::Send { message, .. } | EndpointRequest::Exchange { message, .. } => {
            Some(message.kind())
        }
        EndpointRequest::Compare { .. } => Some(MessageKind::Compare),
        EndpointRequest::Open(_) => None,
    };
    endpoint.requests().into_iter().filter_map(kind).collect()
}

#[test]
fn who_leaves_hears_of_an_end_that_comes_meanwhile() {
    let (core, endpoint) = opened(Silent { under_way: 1, ..Silent::default() });
    endpoint.start().expect("a thread");
    let started = Instant::now();
    let deadline = Duration::from_secs(60);
    thread::scope(|scope| {
        scope.spawn(|| endpoint.close(deadline));
        while endpoint.outgoing.lock().left.is_none() {
            thread::yield_now();
        }
        core.state.end_here(gone(), &[]);
    });
    assert!(endpoint.has_given_up() && started.elapsed() < Duration::from_secs(30));
}

#[test]
fn who_leaves_stays_until_it_is_known_how_the_world_ends() {
    let (core, endpoint) = opened_by(1, Silent::default());
    endpoint.start().expect("a thread");
    let _ = progress::in_turn(|| endpoint.end(gone()));
    assert_eq!(core.state.early_ends.world_end(), None, "the lowest rank decides");
    endpoint.close(Duration::from_secs(60));
    assert_eq!(
        core.state.early_ends.world_end(),
        Some(gone()),
        "though the lowest rank says nothing"
    );
}

#[test]
fn the_lowest_rank_decides_which_end_all_ranks_have() {
    let end = |rank| Error::StepAborted {
        rank: Rank::new(rank),
        step: 0,
        reason: "an end".into(),
        mistake: None,
    };
    let (core, endpoint) = opened(Silent::default());
    endpoint.hear_proposal(Rank::new(2), &end(2));
    assert_eq!(messages(&endpoint), [MessageKind::End, MessageKind::End], "all, and the proposer");
    endpoint.hear_proposal(Rank::new(1), &end(1));
    assert_eq!(messages(&endpoint), [MessageKind::End], "it is told of the first");
    endpoint.hear_end(Rank::new(1), &end(1));
    assert_eq!((messages(&endpoint), core.state.early_ends.world_end()), (vec![], Some(end(2))));
    assert_eq!(core.end(end(0)), end(2));
}

#[test]
fn an_end_that_is_not_of_the_lowest_rank_is_passed_on_to_it_once() {
    let (core, endpoint) = opened_by(1, Silent::default());
    endpoint.hear_end(Rank::new(2), &gone());
    assert_eq!(messages(&endpoint), [MessageKind::Hello, MessageKind::End]);
    endpoint.hear_end(Rank::new(2), &gone());
    assert_eq!((messages(&endpoint), core.state.early_ends.world_end()), (vec![], Some(gone())));
    let (core, endpoint) = opened_by(1, Silent::default());
    endpoint.hear_end(Rank::new(0), &gone());
    assert_eq!(messages(&endpoint), [MessageKind::Hello], "the lowest rank knows its own");
    assert_eq!(core.state.early_ends.world_end(), Some(gone()));
}

#[test]
fn a_rank_that_has_left_is_not_the_lowest() {
    let (core, endpoint) = opened_by(2, Silent::default());
    for rank in [0, 1, 2] {
        assert_eq!(endpoint.lowest(), Some(Rank::new(rank)));
        assert!(core.state.record(Rank::new(rank)).leave());
    }
    assert_eq!(endpoint.lowest(), None);
    assert_eq!(core.end(gone()), gone(), "no rank is waited for");
}

#[test]
fn a_turn_that_panics_is_over() {
    let ended = panic::catch_unwind(|| progress::in_turn(|| panic!("in a turn")));
    assert!(ended.is_err() && !progress::is_in_turn());
}

#[test]
fn a_turn_within_a_turn_leaves_the_outer_one() {
    progress::in_turn(|| {
        progress::in_turn(|| ());
        assert!(progress::is_in_turn());
    });
}

#[test]
fn a_turn_does_not_wait_for_its_own_end() {
    let held = Arc::new(());
    let (core, endpoint) =
        opened(Silent { under_way: 1, _held: Arc::clone(&held), ..Silent::default() });
    endpoint.start().expect("a thread");
    progress::in_turn(|| endpoint.close(Duration::from_millis(20)));
    assert!(!endpoint.outgoing.lock().has_ended, "it goes on");
    drop((core, endpoint));
    let until = from_now(Duration::from_secs(30));
    while Arc::strong_count(&held) > 1 && Instant::now() < until {
        thread::yield_now();
    }
    assert_eq!(Arc::strong_count(&held), 1, "and ends by itself");
}

#[test]
fn who_gives_up_leaves_nothing_to_a_thread() {
    let held = Arc::new(());
    let (core, endpoint) =
        opened(Silent { under_way: 1, _held: Arc::clone(&held), ..Silent::default() });
    endpoint.start().expect("a thread");
    endpoint.close(Duration::ZERO);
    assert!(endpoint.has_given_up());
    drop((core, endpoint));
    assert_eq!(Arc::strong_count(&held), 1, "the transport is gone");
}

#[test]
fn others_are_told_of_a_step_that_is_given_up_but_not_where_the_world_is_over() {
    let (core, endpoint) = opened(Silent::default());
    core.end_epoch(0, gone());
    assert_eq!(messages(&endpoint), [MessageKind::Stop]);
    core.state.end_here(gone(), &[]);
    core.end_epoch(1, gone());
    assert_eq!(messages(&endpoint), []);
}

/// The process may have ended, or the network may have been cut: the connection looks the same.
#[test]
fn a_rank_whose_connection_has_ended_is_unreachable_unless_its_process_is_known_to_be_gone() {
    let lost = Some(loss(1, Cause::Ended("its connection ended".to_owned())));
    let (core, endpoint) = opened(Silent { lost, ..Silent::default() });
    let _ = endpoint.hear();
    assert_eq!(core.state.early_ends.world_end(), None, "it is looked at again");
    let (rank, reason) = end_after_turns(&core, &endpoint);
    let problem = "its connection ended".into();
    assert_eq!((rank, reason), (Rank::new(1), AbortReason::Unreachable { problem }));
}

/// The end that a rank proposes whose deadline has passed.
fn late(core: &Core) -> Error {
    let ranks = [0, 1, 2].map(Rank::new);
    let awaited = barrier_of(GroupId::of(&ranks, Channel::User));
    let arrived = [Rank::new(0)].into();
    let missing = [Rank::new(1), Rank::new(2)].into();
    let deadline = Duration::from_secs(1);
    let reason = AbortReason::Deadline { awaited: Arc::new(awaited), deadline, arrived, missing };
    core.state.ended_by(Rank::new(1), reason)
}

#[test]
fn no_rank_is_late_while_its_messages_may_wait_in_a_silent_process() {
    let silent = Some(loss(2, Cause::Unreachable("it does not answer".to_owned())));
    let (core, endpoint) = opened(Silent { silent, ..Silent::default() });
    let reason = AbortReason::Unreachable { problem: "it does not answer".into() };
    endpoint.await_forwarder();
    assert_eq!(core.state.early_ends.world_end(), Some(core.state.ended_by(Rank::new(2), reason)));
    assert_eq!(messages(&endpoint), [MessageKind::End], "that this rank hears nothing");

    let (core, endpoint) = opened(Silent::default());
    endpoint.await_forwarder();
    assert_eq!(core.state.early_ends.world_end(), None, "messages pass, and a rank may be late");
}

/// A transport that delivers nothing until this rank asks the process that forwards all messages.
struct Stopped {
    other: Box<dyn Transport>,
    came: VecDeque<(Rank, Buffer)>,
    has_answered: bool,
}

impl Transport for Stopped {
    fn send(&mut self, to: &[Rank], message: &Arc<RankMessage>) -> Result<(), TransportError> {
        self.other.send(to, message)
    }

    fn receive(&mut self) -> Result<Option<(Rank, Buffer)>, TransportError> {
        self.came.extend(self.other.receive()?);
        Ok(self.has_answered.then(|| self.came.pop_front()).flatten())
    }

    fn under_way(&mut self) -> Result<usize, TransportError> {
        self.other.under_way()
    }

    /// Answers when it has the messages that the test waits for: the hello of the other rank, and
    /// its part in the operation.
    fn forwarder(&mut self) -> Answer {
        self.came.extend(self.other.receive().expect("a wire"));
        self.has_answered |= self.came.len() >= 2;
        if self.has_answered { Answer::Heard } else { Answer::Awaited }
    }

    fn close(&mut self, ended: Option<&Error>) {
        self.other.close(ended);
    }
}

#[test]
fn no_rank_is_late_whose_message_comes_with_the_answer_of_the_process_that_forwards_it() {
    let mut wires = remote::wires(2).into_iter();
    let mut rank =
        |rank, deadline, transport: &dyn Fn(Box<dyn Transport>) -> Box<dyn Transport>| {
            let asked = Asked { size: 2, processes: 2 };
            let options = WorldOptions { deadline, ..WorldOptions::default() };
            let wire = wires.next().expect("two");
            World::by(2, Rank::new(rank), asked, options, transport(wire))
        };
    let stopped = |other| -> Box<dyn Transport> {
        Box::new(Stopped { other, came: VecDeque::new(), has_answered: false })
    };
    let waiting = rank(0, Duration::from_millis(20), &stopped);
    let in_time = rank(1, Duration::from_secs(60), &|wire| wire);
    let barrier = |world: &World| world.world_group(Channel::User).barrier(Tag::default());
    let came = barrier(&in_time).expect("it is issued");
    barrier(&waiting).and_then(Pending::wait).expect("the other rank has come");
    came.wait().expect("both have come");
    assert_eq!([waiting.end(), in_time.end()], [None, None]);
}

/// The lock of the transport is held as by a call of MPI that does not return.
#[test]
fn a_progress_thread_that_hangs_in_its_turn_delays_the_end_for_a_bounded_time() {
    let (core, endpoint) = opened(Silent::default());
    let started = Instant::now();
    let late = late(&core);
    let turn = endpoint.progress.lock();
    endpoint.await_forwarder();
    assert_eq!(core.end(late.clone()), late);
    drop(turn);
    assert!(started.elapsed() < Duration::from_secs(20), "it does not wait for the turn");
}
