//! Messages of the collectives on vectors, whose elements go as they are.

use std::ops::ControlFlow::Break;
use std::ops::Range;

use hsdp_kernels::Element;

use super::transmit::{At, DataMessages, Next, Transmit};
use crate::execute::{Handing, MemberBuffers, Splits, check_pairs, combine, sources_of};
use crate::pattern::Pattern;
use crate::{Counts, Op};

impl<T: Element> Transmit for MemberBuffers<T> {
    const FUNCTION: u8 = 1;

    fn pack(&self, _at: &At, (_, range): (usize, Range<usize>), body: &mut [u8]) {
        body.copy_from_slice(bytemuck::cast_slice(&self.source.elements()[range]));
    }

    fn unpack(self, at: &At, messages: &DataMessages) -> Next<Self> {
        Break(self.filled(&at.pattern(), messages))
    }
}

impl<T: Element> MemberBuffers<T> {
    fn filled(self, pattern: &Pattern<'_>, messages: &DataMessages) -> Self {
        let Self { source, mut target } = self;
        if let Some(target) = &mut target {
            fill(target, source.elements(), (pattern, 0), messages);
        }
        Self::done(source, target)
    }
}

impl<T: Element> Transmit for Splits<T> {
    const FUNCTION: u8 = 2;

    fn pack(&self, at: &At, part: (usize, Range<usize>), body: &mut [u8]) {
        self.buffers.pack(at, part, body);
    }

    /// Also about splits that are no business of this member: all are told alike.
    fn learn(&mut self, at: &At, messages: &DataMessages) -> Result<(), String> {
        let (own, members) = ((&self.send, &self.receive), at.ranks.len());
        let is_whole = |it: &Vec<usize>| it.len() == members;
        let of = |slot| match messages.data_header(slot).map(|it| &it.descriptor.counts) {
            None => Ok(own),
            Some(Counts::Splits { send, receive }) if is_whole(send) && is_whole(receive) => {
                Ok((send, receive))
            }
            _ => {
                Err(format!("member {slot} does not have one count for each of {members} members"))
            }
        };
        check_pairs(&(0..members).map(of).collect::<Result<Vec<_>, _>>()?)
    }

    fn unpack(self, at: &At, messages: &DataMessages) -> Next<Self> {
        let Self { buffers, send, receive } = self;
        Break(buffers.filled(&at.pattern().dealt(&send, &receive), messages))
    }
}

/// A barrier: that a member is there.
impl Transmit for () {
    const FUNCTION: u8 = 3;

    fn unpack(self, _at: &At, _messages: &DataMessages) -> Next<Self> {
        Break(())
    }
}

/// A permutation.
impl<T: Element> Transmit for Handing<T> {
    const FUNCTION: u8 = 4;

    /// The receiver, from 1; 0 where there is none.
    fn note(&self) -> u64 {
        self.destination.map_or(0, |to| to as u64 + 1)
    }

    fn pack(&self, _at: &At, (_, range): (usize, Range<usize>), body: &mut [u8]) {
        body.copy_from_slice(bytemuck::cast_slice(&self.values[range]));
    }

    fn learn(&mut self, at: &At, messages: &DataMessages) -> Result<(), String> {
        let members = at.ranks.len();
        let destination = |slot| {
            let Some(data_header) = messages.data_header(slot) else { return self.destination };
            let to = data_header.form.note.checked_sub(1)?;
            usize::try_from(to).ok().filter(|to| *to < members)
        };
        let destinations: Vec<_> = (0..members).map(destination).collect();
        self.giver = sources_of(&destinations)?[at.slot];
        Ok(())
    }

    fn unpack(self, at: &At, messages: &DataMessages) -> Next<Self> {
        Break(match self.giver {
            Some(giver) if giver == at.slot => self.values,
            Some(giver) => messages.elements(giver).to_vec(),
            None => bytemuck::zeroed_vec(self.values.len()),
        })
    }
}

/// A transfer, or an all_reduce.
impl<T: Element> Transmit for Vec<T> {
    const FUNCTION: u8 = 5;

    fn pack(&self, _at: &At, (_, range): (usize, Range<usize>), body: &mut [u8]) {
        body.copy_from_slice(bytemuck::cast_slice(&self[range]));
    }

    fn unpack(mut self, at: &At, messages: &DataMessages) -> Next<Self> {
        match at.actual.op {
            Op::Send => Break(Self::new()),
            Op::Recv => Break(messages.elements(0).to_vec()),
            _ => {
                fill(&mut self, &[], (&at.pattern(), at.round), messages);
                at.go_on(self, |values| values)
            }
        }
    }
}

/// Fills `target` with the elements that all members give, this one from its `source`, or from the target where it has none.
pub(super) fn fill<T: Element>(
    target: &mut [T],
    source: &[T],
    (pattern, round): (&Pattern<'_>, u8),
    messages: &DataMessages,
) {
    let own = pattern.slot;
    if let Some(reduction) = pattern.combines(round) {
        let target = &mut target[pattern.takes(round, own)];
        let before = if source.is_empty() { target.to_vec() } else { Vec::new() };
        let given =
            if source.is_empty() { &before[..] } else { &source[pattern.gives(round, own)] };
        let part = |from| if from == own { given } else { messages.elements(from) };
        return combine(reduction, target, &(0..pattern.members).map(part).collect::<Vec<_>>());
    }
    if !source.is_empty() {
        target[pattern.takes(round, own)].copy_from_slice(&source[pattern.gives(round, own)]);
    }
    for from in pattern.others() {
        target[pattern.takes(round, from)].copy_from_slice(messages.elements(from));
    }
}
