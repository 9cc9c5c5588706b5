//! Data messages: elements of an operation, as members send them to each other.

use std::hash::Hash as _;
use std::ops::Range;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::header::{DataHeader, Form};
use super::message::RankMessage;
use crate::execute::{At, Contribute, LAYOUTS_DIFFER, MemberSays};

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

/// Returns the difference of a contribution from others with the same descriptor.
pub(crate) fn form_of<D: Contribute>(own: &D) -> Form {
    let digest = |layout: &_| {
        let mut hash = Xxh3::new();
        hsdp_sharding::UnitLayout::hash(layout, &mut hash);
        hash.digest()
    };
    Form { function: D::FUNCTION, layout: own.layout().map_or(0, digest), note: own.note() }
}

impl DataMessages {
    /// Returns the elements of the member in slot `from`, as bytes; none of this member.
    pub(crate) fn bytes(&self, from: usize) -> &[u8] {
        self.0[from].as_ref().map_or(&[], |message| message.payload.bytes())
    }

    /// Checks that the messages are those that `own` expects.
    ///
    /// # Errors
    /// The difference.
    pub(crate) fn check<D: Contribute>(&self, at: At<'_>, own: &mut D) -> Result<(), String> {
        let own_form = form_of(own);
        let forms = || self.0.iter().flatten().map(|message| message.data_header.form);
        if forms().any(|form| form.function != own_form.function) {
            return Err("ranks call different functions".to_owned());
        }
        if forms().any(|form| form.layout != own_form.layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let said = |slot: usize| match &self.0[slot] {
            Some(DataMessage { data_header: DataHeader { descriptor, form, .. }, .. }) => {
                MemberSays { counts: &descriptor.counts, note: form.note }
            }
            None => MemberSays { counts: &at.actual.counts, note: own_form.note },
        };
        own.learn(at, said)?;
        let pattern = own.pattern(at.pattern());
        let to = at.slot;
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
    message: Arc<RankMessage>,
    range: Range<usize>,
}

impl Payload {
    /// All elements of a message.
    pub(crate) fn whole(message: RankMessage) -> Self {
        let range = 0..message.body().len();
        Self { message: Arc::new(message), range }
    }

    /// Some bytes of a message's elements. They are aligned for all elements if the range begins at a multiple of 64.
    pub(crate) fn part(message: &Arc<RankMessage>, range: Range<usize>) -> Self {
        Self { message: Arc::clone(message), range }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.message.body()[self.range.clone()]
    }
}
