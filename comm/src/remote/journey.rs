//! One operation of a rank whose peers share no memory with it: what it brings is packed and sent, and what they send is laid into
//! their slots. `REMOTE.md`, "An operation".

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use hsdp_sharding::Rank;

use super::desk::Receiver;
use super::letter::{Kind, Letter};
use super::line::InLine;
use super::office::{Errand, Office};
use super::statement::{Brought, parcel_bytes};
use super::travels::{At, Parcel, Travels};
use super::unpack::{Deposit, Unpack};
use crate::backend::thread::{Access, InBlock, Member, Operation, Ticket, panic_message};
use crate::flight::{EntryNumber, FlightState};
use crate::{AbortReason, Descriptor, Error};

/// One operation, as this rank takes part in it.
pub(crate) struct Journey<S> {
    access: Arc<Access>,
    office: Arc<Office>,
    at: At,
    entry: EntryNumber,
    brings: PhantomData<fn(S)>,
}

impl<S: Travels> Journey<S> {
    /// Issues an operation: what this member brings is on its way when this returns.
    pub(crate) fn begin(
        office: &Arc<Office>,
        member: Member<'_>,
        descriptor: Arc<Descriptor>,
        own: S,
    ) -> Result<Ticket, Error> {
        let Member { access, site, entry, .. } = member;
        let at = At { descriptor, slot: site.slot, ranks: Arc::clone(&site.ranks), round: 0 };
        let journey = Arc::new(Self {
            access: Arc::clone(access),
            office: Arc::clone(office),
            at,
            entry,
            brings: PhantomData,
        });
        journey.depart(member, own)
    }

    pub(super) fn at(&self) -> &At {
        &self.at
    }

    fn depart(self: Arc<Self>, member: Member<'_>, mut own: S) -> Result<Ticket, Error> {
        let (access, descriptor) = (Arc::clone(&self.access), Arc::clone(&self.at.descriptor));
        let sent = self.pack_guarded(&mut own);
        let sent = sent.and_then(|letters| self.office.commit(&descriptor, letters));
        if let Err(error) = sent {
            access.record(self.own_rank()).flight.settle(self.entry, FlightState::Failed);
            return Err(error);
        }
        let assemble = self.assembling();
        let stands_in_line = own.beside(&self.at, self.at.slot).is_some();
        let ticket = access.submit(member, descriptor, Deposit::Own(own), assemble)?;
        if stands_in_line {
            let (office, operation) = (Arc::clone(&self.office), Arc::clone(ticket.operation()));
            office.queue(InLine { receiver: self, operation });
        } else {
            self.open(ticket.operation());
        }
        Ok(ticket)
    }

    /// Has what others send laid into their slots from now on.
    fn open(self: Arc<Self>, operation: &Arc<Operation>) {
        let (office, operation) = (Arc::clone(&self.office), Arc::clone(operation));
        office.post(Errand::Open { receiver: self, operation });
    }

    fn assembling(
        self: &Arc<Self>,
    ) -> impl FnOnce(Vec<Deposit<S>>) -> Result<Unpack<S>, String> + use<S> {
        let journey = Arc::clone(self);
        move |deposits| Unpack::new(journey, deposits)
    }

    /// Packs what the others get. What fails there ends the world: it has its number already.
    fn pack_guarded(&self, own: &mut S) -> Result<Vec<Errand>, Error> {
        let in_block = InBlock::enter();
        let packed = catch_unwind(AssertUnwindSafe(|| {
            let letters = self.pack(own)?;
            own.keep(&self.at)?;
            Ok::<_, Error>(letters)
        }));
        drop(in_block);
        let reason = match packed {
            Ok(Ok(packed)) => return Ok(packed),
            // The others wait for what cannot be sent.
            Ok(Err(error)) => AbortReason::Requested { reason: error.to_string().into() },
            Err(panic) => AbortReason::Panicked { message: panic_message(&*panic) },
        };
        Err(self.access.end(self.access.ended_by(self.own_rank(), reason)))
    }

    fn pack(&self, own: &S) -> Result<Vec<Errand>, Error> {
        let brought = Brought {
            descriptor: Arc::clone(&self.at.descriptor),
            step: self.access.record(self.own_rank()).step(),
            form: own.form(),
        };
        let statement = parcel_bytes(&brought);
        let others = (0..self.at.members()).filter(|slot| *slot != self.at.slot);
        if own.is_for_all(&self.at) {
            let to: Vec<_> = others.clone().map(|slot| self.at.ranks[slot]).collect();
            let first = others.clone().next();
            let letter = first.map(|slot| self.letter(&statement, own, slot)).transpose()?;
            return Ok(letter.map(|letter| Errand::Send { to, letter }).into_iter().collect());
        }
        let errand = |slot| {
            let letter = self.letter(&statement, own, slot)?;
            Ok(Errand::Send { to: vec![self.at.ranks[slot]], letter })
        };
        others.map(errand).collect()
    }

    fn letter(&self, statement: &[u8], own: &S, to: usize) -> Result<Arc<Letter>, Error> {
        let bytes = own.bytes_for(&self.at, to);
        let kind = (Kind::Parcel, self.at.round);
        let letter = Letter::write(self.office.shelf(), kind, statement, bytes);
        let mut letter = letter.ok_or_else(|| self.out_of_memory(bytes))?;
        own.pack(&self.at, to, letter.body_mut());
        Ok(Arc::new(letter))
    }

    fn out_of_memory(&self, bytes: usize) -> Error {
        let Descriptor { op, tag, .. } = &*self.at.descriptor;
        let (op, rank, step) = (*op, self.own_rank(), tag.step);
        Error::OutOfMemory { op, rank, step, bytes, what: format!("a message, in {tag}") }
    }

    fn own_rank(&self) -> Rank {
        self.at.ranks[self.at.slot]
    }

    /// Brings `own` to another round of an operation.
    pub(super) fn go_on(&self, operation: &Arc<Operation>, mut own: S) {
        let next = self.next_round();
        let letters = match next.pack_guarded(&mut own) {
            Ok(letters) => letters,
            // That has ended the world.
            Err(_) => return self.access.fail_at_end(operation),
        };
        let place = (operation, next.at.slot);
        let own = Deposit::Own(own);
        self.access.gather_again::<_, Unpack<S>>(place, &next.at.descriptor, own);
        letters.into_iter().for_each(|letter| self.office.post(letter));
        next.open(operation);
    }

    fn next_round(&self) -> Arc<Self> {
        let at = At { round: self.at.round + 1, ..self.at.clone() };
        Arc::new(Self {
            access: Arc::clone(&self.access),
            office: Arc::clone(&self.office),
            at,
            entry: self.entry,
            brings: PhantomData,
        })
    }
}

impl<S: Travels> Receiver for Journey<S> {
    fn descriptor(&self) -> &Arc<Descriptor> {
        &self.at.descriptor
    }

    fn round(&self) -> u8 {
        self.at.round
    }

    fn ranks(&self) -> &[Rank] {
        &self.at.ranks
    }

    fn lay(self: Arc<Self>, operation: &Arc<Operation>, slot: usize, parcel: Parcel) {
        let descriptor = Arc::clone(&parcel.brought.descriptor);
        let assemble = self.assembling();
        let deposit = Deposit::Other(parcel);
        // An error has ended the world already: this rank hears of it where it waits.
        let _ = self.access.arrive((operation, slot), &descriptor, deposit, assemble);
    }
}

impl<S> std::fmt::Debug for Journey<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journey").field("at", &self.at).finish_non_exhaustive()
    }
}
