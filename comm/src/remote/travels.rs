//! What of a member's deposit travels to the others, and what it makes of theirs. `REMOTE.md`, "Data of each call".

use std::sync::Arc;

use bytemuck::Pod;
use hsdp_sharding::Rank;

use super::letter::Letter;
use super::statement::{Brought, Form};
use crate::{Descriptor, Error};

/// Where a member stands in an operation.
#[derive(Clone, Debug)]
pub(crate) struct At {
    pub(crate) descriptor: Arc<Descriptor>,
    /// The member's own.
    pub(crate) slot: usize,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// From 0. An all-reduce has two.
    pub(crate) round: u8,
}

impl At {
    pub(crate) fn members(&self) -> usize {
        self.ranks.len()
    }

    /// Whether `slot` is that of the root.
    pub(crate) fn is_root(&self, slot: usize) -> bool {
        self.descriptor.root == Some(self.ranks[slot])
    }
}

/// What a member brings to an operation whose other members share no memory with it: nothing but that it has come, unless it says
/// otherwise.
pub(crate) trait Travels: Sized + Send + 'static {
    /// What it gets.
    type Output: Send + 'static;

    /// What the others are to know of it beside its descriptor.
    fn form(&self) -> Form;

    /// How many bytes of it travel to the member in slot `to`.
    fn bytes_for(&self, _at: &At, _to: usize) -> usize {
        0
    }

    /// Writes what travels there. May call code of users.
    fn pack(&self, _at: &At, _to: usize, _body: &mut [u8]) {}

    /// Whether all members get the same, so that it is packed once.
    fn is_for_all(&self, _at: &At) -> bool {
        true
    }

    /// What travels was packed: keeps what stays here, if that was lent for no longer. May call code of users.
    ///
    /// # Errors
    /// What failed. It ends the world: the others have this member's promise.
    fn keep(&mut self, _at: &At) -> Result<(), Error> {
        Ok(())
    }

    /// How many bytes this member gets of the one in slot `from` otherwise than by letter, where something else carries what
    /// members bring. Such operations are opened in line.
    fn beside(&self, _at: &At, _from: usize) -> Option<usize> {
        None
    }

    /// Whether what came fits.
    ///
    /// # Errors
    /// What does not: in words that go before "in operation ...".
    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        parcels.check(at, |_| 0)
    }

    /// What becomes of it with what came, which was checked.
    fn unpack(self, at: &At, parcels: &Parcels) -> Turn<Self>;
}

/// What becomes of a deposit when all have come.
pub(crate) enum Turn<S: Travels> {
    /// The output.
    Done(S::Output),
    /// What is brought to another round.
    Again(S),
}

/// What the other members sent, by slot.
#[derive(Debug)]
pub(crate) struct Parcels(pub(super) Vec<Option<Parcel>>);

/// What one of them sent.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) brought: Brought,
    pub(crate) letter: Letter,
}

impl Parcels {
    /// What the member in slot `from` sent; nothing of this member.
    pub(crate) fn bytes(&self, from: usize) -> &[u8] {
        self.0[from].as_ref().map_or(&[], |parcel| parcel.letter.body())
    }

    /// What the member in slot `from` said; nothing of this member.
    pub(crate) fn brought(&self, from: usize) -> Option<&Brought> {
        self.0[from].as_ref().map(|parcel| &parcel.brought)
    }

    /// The same, as elements: of a parcel that was checked.
    pub(crate) fn elements<T: Pod>(&self, from: usize) -> &[T] {
        bytemuck::cast_slice(self.bytes(from))
    }

    /// The same of every member, in slot order, with `own` in this member's place.
    pub(crate) fn with_own<'a, T: Pod>(&'a self, at: &At, own: &'a [T]) -> Vec<&'a [T]> {
        let of = |slot| if slot == at.slot { own } else { self.elements(slot) };
        (0..at.members()).map(of).collect()
    }

    /// Whether every other member sent as many bytes as `expected` says of its slot.
    ///
    /// # Errors
    /// Who did not.
    pub(crate) fn check(&self, at: &At, expected: impl Fn(usize) -> usize) -> Result<(), String> {
        for from in (0..at.members()).filter(|from| *from != at.slot) {
            let (found, expected) = (self.bytes(from).len(), expected(from));
            if found != expected {
                let own = at.slot;
                return Err(format!(
                    "member {from} sends {found} bytes to member {own}, which expects {expected},"
                ));
            }
        }
        Ok(())
    }
}
