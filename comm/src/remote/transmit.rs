//! Data messages: the members of an operation pack them for each other, and unpack those of others.

use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use hsdp_sharding::{Rank, UnitLayout};

use super::header::{DataHeader, Form};
use super::message::Message;
use super::units::digest;
use crate::execute::Buffers;
use crate::pattern::Pattern;
use crate::{Descriptor, Error, Scaling};

/// Where a member stands in an operation.
#[derive(Clone, Debug)]
pub(crate) struct At {
    /// The call, as this member means it.
    pub(crate) actual: Arc<Descriptor>,
    /// The member's own.
    pub(crate) slot: usize,
    /// The members, by slot.
    pub(crate) ranks: Arc<[Rank]>,
    /// From 0. An all-reduce has two.
    pub(crate) round: u8,
}

impl At {
    /// The plain pattern of the operation.
    pub(crate) fn pattern(&self) -> Pattern<'static> {
        Pattern::of(&self.actual, &self.ranks, self.slot)
    }

    /// Divisors and wire dtype.
    ///
    /// # Panics
    /// If the operation has none.
    pub(crate) fn scaling(&self) -> Scaling {
        self.actual.scaling.expect("a reduction of gradients has one")
    }

    /// After this round comes another one, or the output.
    pub(crate) fn go_on<S: Buffers>(&self, own: S, output: fn(S) -> S::Output) -> Next<S> {
        let is_last = self.round + 1 == self.pattern().rounds();
        if is_last { Break(output(own)) } else { Continue(own) }
    }
}

/// A member's buffers after a round: its output, or its contribution to another round.
pub(crate) type Next<S> = ControlFlow<<S as Buffers>::Output, S>;

/// Buffers whose elements go by messages: the pattern says which, and these are packed into bytes and unpacked.
pub(crate) trait Transmit: Buffers + Sized {
    /// The function that was called: descriptors alone do not tell all of them apart.
    const FUNCTION: u8;

    /// The layout of a unit that was passed.
    fn layout(&self) -> Option<&UnitLayout> {
        None
    }

    /// A note of this member alone.
    fn note(&self) -> u64 {
        0
    }

    /// Writes the elements of `range`, which go to the member in slot `to`. May call code of users.
    fn pack(&self, _at: &At, (_to, _range): (usize, Range<usize>), _body: &mut [u8]) {}

    /// All messages were packed: keeps the part that stays here, if that was lent for no longer. May call code of users.
    ///
    /// # Errors
    /// The failure. It ends the world: the others have this member's promise.
    fn keep(&mut self, _at: &At) -> Result<(), Error> {
        Ok(())
    }

    /// Learns facts that only the messages of all say together.
    ///
    /// # Errors
    /// The contradiction, in words that go before "in operation ...".
    fn learn(&mut self, _at: &At, _messages: &DataMessages) -> Result<(), String> {
        Ok(())
    }

    /// Unpacks messages, which were checked.
    fn unpack(self, at: &At, messages: &DataMessages) -> Next<Self>;

    /// The difference from other operations with this descriptor.
    fn form(&self) -> Form {
        let layout = self.layout().map_or(0, digest);
        Form { function: Self::FUNCTION, layout, note: self.note() }
    }
}

/// The messages of the other members, by slot.
#[derive(Debug)]
pub(crate) struct DataMessages(pub(crate) Vec<Option<DataMessage>>);

/// The part of one of them in an operation.
#[derive(Debug)]
pub(crate) struct DataMessage {
    pub(crate) data_header: DataHeader,
    pub(crate) round: u8,
    pub(crate) payload: Payload,
}

impl DataMessages {
    /// The elements of the member in slot `from`, as bytes; none of this member.
    pub(crate) fn bytes(&self, from: usize) -> &[u8] {
        self.0[from].as_ref().map_or(&[], |message| message.payload.bytes())
    }

    /// The header of the member in slot `from`; none of this member.
    pub(crate) fn data_header(&self, from: usize) -> Option<&DataHeader> {
        self.0[from].as_ref().map(|message| &message.data_header)
    }

    /// The elements of the member in slot `from`, of a message that was checked.
    pub(crate) fn elements<T: Pod>(&self, from: usize) -> &[T] {
        bytemuck::cast_slice(self.bytes(from))
    }

    /// Whether the messages are those that `own` expects.
    ///
    /// # Errors
    /// The difference.
    pub(crate) fn check<S: Transmit>(&self, at: &At, own: &mut S) -> Result<(), String> {
        let Form { function, layout, .. } = own.form();
        let forms = || self.0.iter().flatten().map(|message| message.data_header.form);
        if forms().any(|form| form.function != function) {
            return Err("ranks call different functions".to_owned());
        }
        if forms().any(|form| form.layout != layout) {
            return Err("ranks have different layouts of one unit".to_owned());
        }
        own.learn(at, self)?;
        let (pattern, to) = (own.pattern(at.pattern()), at.slot);
        for from in pattern.others() {
            let found = self.bytes(from).len();
            let expected = pattern.bytes_from(at.round, from);
            if found != expected {
                return Err(format!(
                    "member {from} sends {found} bytes to member {to}, which expects {expected},"
                ));
            }
        }
        Ok(())
    }
}

/// A part of the elements of a message, which stays as long as one of its parts does.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    message: Arc<Message>,
    range: Range<usize>,
}

impl Payload {
    /// All elements of a message.
    pub(crate) fn whole(message: Message) -> Self {
        let range = 0..message.body().len();
        Self { message: Arc::new(message), range }
    }

    /// Some bytes of a message's elements. They are aligned for all elements if the range begins at a multiple of 64.
    pub(crate) fn part(message: &Arc<Message>, range: Range<usize>) -> Self {
        Self { message: Arc::clone(message), range }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.message.body()[self.range.clone()]
    }
}
