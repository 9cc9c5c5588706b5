//! What travels of the collectives that read one buffer and fill another.

use std::ops::Range;

use hsdp_kernels::Element;

use super::statement::Form;
use super::travels::{At, Parcels, Travels, Turn};
use crate::collectives::{Splits, check_pairs};
use crate::execute::{Exchange, combine};
use crate::{Counts, Op, Reduction};

impl<T: Element> Exchange<T> {
    /// The elements of the source that travel to the member in slot `to`.
    fn part_for(&self, at: &At, to: usize) -> Range<usize> {
        let len = self.source.len();
        match at.descriptor.op {
            Op::Gather | Op::Reduce if !at.is_root(to) => 0..0,
            Op::Scatter | Op::ReduceScatter => {
                let part = len / at.members();
                to * part..(to + 1) * part
            }
            _ => 0..len,
        }
    }

    /// How many elements come from the member in slot `from`.
    fn expected_from(&self, at: &At, from: usize) -> usize {
        let taken = self.target.as_ref().map_or(0, Vec::len);
        match at.descriptor.op {
            Op::AllGather | Op::Gather => taken / at.members(),
            Op::Broadcast | Op::Scatter if !at.is_root(from) => 0,
            _ => taken,
        }
    }
}

impl<T: Element> Travels for Exchange<T> {
    type Output = Self;

    fn form(&self) -> Form {
        Form { function: 1, ..Form::default() }
    }

    fn bytes_for(&self, at: &At, to: usize) -> usize {
        self.part_for(at, to).len() * size_of::<T>()
    }

    fn pack(&self, at: &At, to: usize, body: &mut [u8]) {
        let part = &self.source.elements()[self.part_for(at, to)];
        body.copy_from_slice(bytemuck::cast_slice(part));
    }

    fn is_for_all(&self, at: &At) -> bool {
        matches!(at.descriptor.op, Op::AllGather | Op::Broadcast)
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        parcels.check(at, |from| self.expected_from(at, from) * size_of::<T>())
    }

    fn unpack(self, at: &At, parcels: &Parcels) -> Turn<Self> {
        let Self { source, target } = self;
        let Some(mut target) = target else { return Turn::Done(Self::done(source, None)) };
        let Range { start, end } = Self::own_part(source.len(), at);
        let own = &source.elements()[start..end];
        match (at.descriptor.op, at.descriptor.reduction) {
            (Op::AllGather | Op::Gather, _) => {
                let parts = target.chunks_exact_mut(own.len().max(1));
                parts
                    .zip(parcels.with_own(at, own))
                    .for_each(|(part, it)| part.copy_from_slice(it));
            }
            (Op::ReduceScatter, Some(reduction)) => {
                combine(reduction, &mut target, &parcels.with_own(at, own));
            }
            (Op::Reduce, Some(reduction)) => reduce_in_place(reduction, &mut target, at, parcels),
            _ if at.is_root(at.slot) => target.copy_from_slice(own),
            _ => {
                let root = (0..at.members()).find(|slot| at.is_root(*slot));
                target.copy_from_slice(parcels.elements(root.expect("it was compared")));
            }
        }
        Turn::Done(Self::done(source, Some(target)))
    }
}

impl<T> Exchange<T> {
    /// What a member's own source brings to its own target.
    fn own_part(len: usize, at: &At) -> Range<usize> {
        match at.descriptor.op {
            Op::Scatter | Op::ReduceScatter => {
                let part = len / at.members();
                at.slot * part..(at.slot + 1) * part
            }
            _ => 0..len,
        }
    }
}

/// How many elements are combined at a time.
const STEP: usize = 1 << 10;

/// Combines `values` with what the others sent, in slot order.
pub(super) fn reduce_in_place<T: Element>(
    reduction: Reduction,
    values: &mut [T],
    at: &At,
    parcels: &Parcels,
) {
    let mut own = [T::zeroed(); STEP];
    let mut start = 0;
    for step in values.chunks_mut(STEP) {
        let (own, range) = (&mut own[..step.len()], start..start + step.len());
        own.copy_from_slice(step);
        let part = |slot| {
            if slot == at.slot { &*own } else { &parcels.elements::<T>(slot)[range.clone()] }
        };
        combine(reduction, step, &(0..at.members()).map(part).collect::<Vec<_>>());
        start = range.end;
    }
}

impl<T: Element> Splits<T> {
    fn part_for(&self, to: usize) -> Range<usize> {
        let start = self.send[..to].iter().sum();
        start..start + self.send[to]
    }
}

impl<T: Element> Travels for Splits<T> {
    type Output = Exchange<T>;

    fn form(&self) -> Form {
        Form { function: 2, ..Form::default() }
    }

    fn bytes_for(&self, _at: &At, to: usize) -> usize {
        self.send[to] * size_of::<T>()
    }

    fn pack(&self, _at: &At, to: usize, body: &mut [u8]) {
        let part = &self.exchange.source.elements()[self.part_for(to)];
        body.copy_from_slice(bytemuck::cast_slice(part));
    }

    fn is_for_all(&self, _at: &At) -> bool {
        false
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        // Also those that are no business of this member: all are told alike.
        let own = (&self.send, &self.receive);
        let of = |slot| match parcels.brought(slot).map(|it| &it.descriptor.counts) {
            Some(Counts::Splits { send, receive })
                if [send, receive].iter().all(|it| it.len() == at.members()) =>
            {
                Ok((send, receive))
            }
            None => Ok(own),
            Some(Counts::Splits { .. }) => Err(format!(
                "member {slot} does not have one count for each of {} members",
                at.members()
            )),
            Some(Counts::Each(_)) => Err(format!("member {slot} has no counts for each member")),
        };
        let splits = (0..at.members()).map(of).collect::<Result<Vec<_>, _>>()?;
        let (send, receive): (Vec<_>, Vec<_>) = splits.into_iter().unzip();
        check_pairs(&send, &receive)?;
        parcels.check(at, |from| self.receive[from] * size_of::<T>())
    }

    fn unpack(self, at: &At, parcels: &Parcels) -> Turn<Self> {
        let own = self.part_for(at.slot);
        let Exchange { source, mut target } = self.exchange;
        let own = &source.elements()[own];
        let mut rest = target.as_deref_mut().unwrap_or_default();
        for part in parcels.with_own(at, own) {
            let (filled, after) = rest.split_at_mut(part.len());
            filled.copy_from_slice(part);
            rest = after;
        }
        Turn::Done(Exchange::done(source, target))
    }
}
