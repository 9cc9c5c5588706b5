//! One operation whose other members share no memory with this rank, from the call to the end: by
//! its pattern, whatever it moves. `REMOTE.md`, "An operation".

use std::ops::ControlFlow::{Break, Continue};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hsdp_sharding::{ByteCount, Rank};

use crate::call::Described;
use crate::engine::{SharedOperation, panic_message};
use crate::execute::{AfterRound, At, Contribute, Meter, NextRound, Outputs, Received, Work};
use crate::remote::{
    DataHeader, DataMessage, DataMessages, Endpoint, EndpointRequest, MessageKind, Open,
    RankMessage, form_of, header_bytes,
};
use crate::slow::WithDue;
use crate::sync::Mutex;
use crate::threads::{InBlock, MemberCall, OwnRank, Ticket};
use crate::{AbortReason, CallError, Descriptor, Error};
use hsdp_flight::FlightState;

/// One operation, as this rank takes part in it.
#[derive(Clone)]
pub(crate) struct Execution {
    own: Arc<OwnRank>,
    /// The call, as the others compare it.
    compared: Arc<Descriptor>,
    /// The call, as this member means it.
    actual: Arc<Descriptor>,
    ranks: Arc<[Rank]>,
    slot: usize,
    round: u8,
}

/// The content of a slot: the buffers of this member, or the message of another.
type SlotContent<D> = (Option<D>, Option<DataMessage>);

impl Execution {
    /// Issues an operation: the contribution of this member is on its way when this returns.
    ///
    /// The operation is opened with the request that sends the contribution. Another rank that has
    /// this contribution may end the world; then the progress engine has put all messages that came
    /// before that end into their slots.
    pub(crate) fn begin<D: Contribute>(
        member: MemberCall<'_>,
        described: Described,
        mut contribution: D,
    ) -> Result<Ticket, Error> {
        let MemberCall { own, site, entry } = member;
        let actual = Arc::clone(described.actual());
        let compared = described.compared;
        let execution = Arc::new(Self {
            own: Arc::clone(own),
            compared: Arc::clone(&compared),
            actual,
            ranks: Arc::clone(&site.ranks),
            slot: site.slot,
            round: 0,
        });
        let failed = |error| {
            own.record.flight.settle(entry, FlightState::Failed);
            error
        };
        let messages = execution.pack_guarded(&mut contribution).map_err(failed)?;
        let content = (Some(contribution), None);
        let assemble = execution.assembling();
        let ticket = own.core.submit(member, Arc::clone(&compared), content, assemble)?;
        let operation = ticket.operation();
        let open = execution.opening::<D>(operation);
        if let Err(error) = execution.endpoint().commit(&compared, messages, open) {
            own.core.state.table.remove(operation.key);
            operation.fail_gathering(&error);
            return Err(error);
        }
        Ok(ticket)
    }

    fn assembling<D: Contribute>(
        self: &Arc<Self>,
    ) -> impl FnOnce(Vec<SlotContent<D>>, &Descriptor) -> Assembled<D> + use<D> {
        let execution = Arc::clone(self);
        move |contributions, descriptor| {
            let (work, received) = Unpack::new(Arc::clone(&execution), contributions)?;
            // One operation occupies its link once, however many rounds it has.
            let carry = || execution.own.core.carry(descriptor, received);
            let due = if execution.at().is_last_round() { carry() } else { None };
            Ok((work, due))
        }
    }

    /// Returns the request by which messages of this round go into the slots of the operation.
    fn opening<D: Contribute>(
        self: &Arc<Self>,
        operation: &Arc<SharedOperation>,
    ) -> EndpointRequest {
        let execution = Arc::clone(self);
        let descriptor = Arc::clone(&self.compared);
        let lay = move |operation: &Arc<SharedOperation>, slot, message: DataMessage| {
            let descriptor = Arc::clone(&message.data_header.descriptor);
            let contribution = (None, Some(message));
            let assemble = execution.assembling::<D>();
            // An error has ended the world already: this rank hears of it where it waits.
            let _ = execution.own.core.arrive(operation, slot, &descriptor, contribution, assemble);
        };
        EndpointRequest::Open(Open::new(
            Arc::clone(operation),
            descriptor,
            self.round,
            Box::new(lay),
        ))
    }

    fn at(&self) -> At<'_> {
        At { actual: &self.actual, ranks: &self.ranks, slot: self.slot, round: self.round }
    }

    fn endpoint(&self) -> &Endpoint {
        self.own.endpoint().expect("the others share no memory")
    }

    /// Packs the messages to the others. A failure there ends the world: the operation has its
    /// number already.
    fn pack_guarded<D: Contribute>(&self, own: &mut D) -> Result<Vec<EndpointRequest>, Error> {
        let in_block = InBlock::enter();
        let packed = catch_unwind(AssertUnwindSafe(|| {
            let messages = self.pack(own)?;
            own.keep(self.at()).map(|()| messages)
        }));
        drop(in_block);
        let reason = match packed {
            Ok(Ok(packed)) => return Ok(packed),
            // The others wait for messages that cannot be sent.
            Ok(Err(error)) => AbortReason::Requested { reason: error.to_string().into() },
            Err(panic) => AbortReason::Panicked { message: panic_message(&*panic) },
        };
        Err(self.own.core.end(self.own.core.state.ended_by(self.own.rank, reason)))
    }

    /// A message for each member; one for all that follow each other and get the same.
    fn pack<D: Contribute>(&self, own: &D) -> Result<Vec<EndpointRequest>, Error> {
        let head = header_bytes(&DataHeader {
            descriptor: Arc::clone(&self.compared),
            step: self.own.record.step(),
            form: form_of(own),
        });
        let pattern = own.pattern(self.at().pattern());
        let mut requests = Vec::new();
        let mut last = None;
        for slot in pattern.others() {
            let range = pattern.gives(self.round, slot);
            let rank = self.ranks[slot];
            match requests.last_mut() {
                Some(EndpointRequest::Send { to, .. }) if last.as_ref() == Some(&range) => {
                    to.push(rank)
                }
                _ => {
                    let message = self.message(&head, own, slot, range.clone())?;
                    requests.push(EndpointRequest::Send { to: vec![rank], message });
                }
            }
            last = Some(range);
        }
        Ok(requests)
    }

    fn message<D: Contribute>(
        &self,
        head: &[u8],
        own: &D,
        to: usize,
        range: Range<usize>,
    ) -> Result<Arc<RankMessage>, Error> {
        let bytes = range.len() * self.at().pattern().element_bytes(self.round);
        let message =
            RankMessage::write(&self.endpoint().pool, MessageKind::Data, self.round, head, bytes);
        let mut message = message.ok_or_else(|| {
            let Descriptor { op, tag, .. } = *self.actual;
            let what = format!("a message, in {tag}");
            CallError::OutOfMemory { op, rank: self.own.rank, step: tag.step, bytes, what }
        })?;
        own.pack(self.at(), to, range, message.body_mut());
        Ok(Arc::new(message))
    }

    /// Brings `own` to another round of an operation.
    fn go_on<D: Contribute>(&self, operation: &Arc<SharedOperation>, mut own: D) {
        let next = Arc::new(Self { round: self.round + 1, ..self.clone() });
        let Ok(mut requests) = next.pack_guarded(&mut own) else {
            // That has ended the world.
            return self.own.core.fail_at_end(operation);
        };
        let contribution: SlotContent<D> = (Some(own), None);
        self.own.core.gather_again(operation, self.slot, &self.compared, contribution);
        requests.push(next.opening::<D>(operation));
        self.endpoint().post_all(requests);
    }
}

/// The work of one round: it makes the output of this member of the messages. It has one block.
struct Unpack<D: Contribute> {
    execution: Arc<Execution>,
    messages: DataMessages,
    /// Buffers of this member after the round before; `None` while they are unpacked, and for good
    /// if that panicked.
    turn: Mutex<Option<AfterRound<D>>>,
}

/// The work of one round, or the reason that messages do not fit.
type Assembled<D> = Result<WithDue<Unpack<D>>, String>;

impl<D: Contribute> Unpack<D> {
    /// Makes the work of one round. Also returns the bytes that this member receives in all rounds.
    ///
    /// # Errors
    /// If the messages do not fit.
    fn new(
        execution: Arc<Execution>,
        contributions: Vec<SlotContent<D>>,
    ) -> Result<(Self, ByteCount), String> {
        let (own, messages): (Vec<_>, _) = contributions.into_iter().unzip();
        let messages = DataMessages(messages);
        let mut own = own.into_iter().flatten().next().ok_or("this member has no input")?;
        messages.check(execution.at(), &mut own)?;
        let received = own.pattern(execution.at().pattern()).received();
        Ok((Self { execution, messages, turn: Mutex::new(Some(Continue(own))) }, received))
    }
}

impl<D: Contribute> Work for Unpack<D> {
    type Gets = D::Gets;

    fn blocks(&self) -> usize {
        1
    }

    fn bytes(&self) -> usize {
        (0..self.messages.0.len()).map(|from| self.messages.bytes(from).len()).sum()
    }

    fn run(&self, _block: usize, _meter: &Meter<'_>) {
        let Some(Continue(own)) = self.turn.lock().take() else {
            unreachable!("a block is run once")
        };
        let at = self.execution.at();
        let received = own.pattern(at.pattern()).received_in(at.round);
        let turn = own.unpack(at, &Received(&|from| self.messages.bytes(from)));
        *self.turn.lock() = Some(turn);
        let Descriptor { channel, op, .. } = *at.actual;
        self.execution.own.record.ledger.received(channel, op, received);
    }

    fn next_round(&mut self) -> Option<NextRound> {
        let mut turn = self.turn.lock();
        match turn.take()? {
            Continue(own) => {
                let execution = Arc::clone(&self.execution);
                Some(Box::new(move |operation| execution.go_on(operation, own)))
            }
            output @ Break(_) => {
                *turn = Some(output);
                None
            }
        }
    }

    fn finish(self) -> Outputs<D::Gets> {
        let Some(Break(output)) = self.turn.into_inner() else {
            unreachable!("the block was run, and there is no other round")
        };
        Outputs::only(self.execution.slot, output)
    }
}
