//! Messages of the calls on whole units: shards, packed gradients, slices of partials.

use std::hash::Hash as _;
use std::mem;
use std::ops::ControlFlow::Break;
use std::ops::Range;

use half::{bf16, f16};
use hsdp_kernels::{
    Divisor, Fold, Values, ValuesMut, copy_all_past_caches, pack, read_once, sum_contributions,
};
use hsdp_sharding::{Piece, Role, UnitLayout};
use xxhash_rust::xxh3::Xxh3;

use super::elements::fill;
use super::transmit::{At, DataMessages, Next, Transmit};
use crate::bytes::{bytes_of, values, values_mut};
use crate::execute::{
    NonFiniteAt, PAST_CACHES, Reduced, Scaled, UnitGatherContribution, UnitReduceContribution,
};
use crate::{Error, Scaling};

pub(super) fn digest(layout: &UnitLayout) -> u64 {
    let mut hash = Xxh3::new();
    layout.hash(&mut hash);
    hash.digest()
}

/// A gather: the shard, with its padding.
impl Transmit for UnitGatherContribution {
    const FUNCTION: u8 = 6;

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }

    fn pack(&self, _at: &At, (_, range): (usize, Range<usize>), body: &mut [u8]) {
        body.copy_from_slice(bytes_of(self.shard.values().slice(range)));
    }

    fn unpack(self, at: &At, messages: &DataMessages) -> Next<Self> {
        let Self { layout, shard, mut targets } = self;
        let dtype = shard.dtype();
        // The other members fill their targets at the same time, from the same caches if they are processes of one machine.
        let filled = layout.full_len() * dtype.size_bytes() * at.ranks.len();
        let is_large = filled > PAST_CACHES;
        for from in 0..at.ranks.len() {
            let is_own = from == at.slot;
            let source = if is_own { shard.values() } else { values(dtype, messages.bytes(from)) };
            for piece in layout.pieces(from) {
                let target = targets[piece.param].values_mut().slice(piece.param_range());
                let source = source.slice(piece.shard_range());
                match is_large {
                    true => copy_all_past_caches([(target, source)]),
                    false => target.copy_from(source),
                }
            }
        }
        Break(targets)
    }
}

/// A reduction: the gradients of each member's shard, divided and rounded to the wire, with zeros for padding and for gradients
/// that are absent.
impl Transmit for UnitReduceContribution {
    const FUNCTION: u8 = 7;

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }

    fn pack(&self, at: &At, (to, _): (usize, Range<usize>), body: &mut [u8]) {
        let scaling = at.scaling();
        self.pack_shard(scaling.pre, to, values_mut(scaling.wire.dtype(), body));
    }

    fn keep(&mut self, at: &At) -> Result<(), Error> {
        self.packed = packed(at, |own, pre| self.pack_shard(pre, at.slot, own));
        self.gradients.clear();
        Ok(())
    }

    fn unpack(self, at: &At, messages: &DataMessages) -> Next<Self> {
        let Self { layout, gradients: _, mut partial, fold, packed } = self;
        let (shards, scaling) = (contributions(at, &packed, messages), summed(at));
        let mut first = None;
        for (piece, place) in places(&layout, at.slot) {
            let sum = &mut partial[place.clone()];
            if piece.is_some() {
                let parts: Vec<_> = shards.iter().map(|it| it.slice(place.clone())).collect();
                let found = sum_contributions(sum, &parts, scaling, fold);
                first = first.or_else(|| Some((piece?.param, place.start + found?)));
            } else if fold == Fold::Replace {
                sum.fill(0.0);
            }
        }
        let non_finite = first.map(|(param, place)| {
            let value = |shard: &Values<'_>| shard.slice(place..place + 1).to_f32()[0];
            let from = shards.iter().position(|shard| !value(shard).is_finite());
            NonFiniteAt { param, from: from.map(|slot| at.ranks[slot]) }
        });
        Break(Reduced { partial, non_finite })
    }
}

impl UnitReduceContribution {
    /// Writes the gradients of the shard of the member in slot `to`.
    fn pack_shard(&self, pre: Divisor, to: usize, mut shard: ValuesMut<'_>) {
        for (piece, place) in places(&self.layout, to) {
            let mut target = shard.reborrow().slice(place);
            match piece.map(|it| (it, &self.gradients[it.param])) {
                Some((Piece { param, .. }, Some(gradient))) => {
                    let range = piece.map_or(0..0, |it| it.param_range());
                    read_once(&**gradient, param, range, &mut |values| {
                        pack(target.reborrow(), values, pre);
                    });
                }
                _ => zero(target),
            }
        }
    }
}

/// The parts of a trainable shard, in order, with their places: parts of parameters, and padding before and after each.
fn places(layout: &UnitLayout, slot: usize) -> impl Iterator<Item = (Option<Piece>, Range<usize>)> {
    let trainable = |piece: &Piece| layout.params()[piece.param].role == Role::Trainable;
    let pieces = layout.pieces(slot).take_while(trainable).map(Some).chain([None]);
    let (len, mut end) = (layout.trainable().shard_len, 0);
    pieces.flat_map(move |piece| {
        let place = piece.map_or(len..len, |it| it.shard_range());
        let padding = mem::replace(&mut end, place.end)..place.start;
        [(None, padding), (piece, place)]
    })
}

fn zero(values: ValuesMut<'_>) {
    match values {
        ValuesMut::F32(values) => values.fill(0.0),
        ValuesMut::F16(values) => values.fill(f16::ZERO),
        ValuesMut::BF16(values) => values.fill(bf16::ZERO),
    }
}

/// A scaled sum: slices that are divided and rounded to the wire; then the finished slices, in f32.
impl Transmit for Scaled {
    const FUNCTION: u8 = 8;

    fn pack(&self, at: &At, (_, range): (usize, Range<usize>), body: &mut [u8]) {
        let (scaling, slice) = (at.scaling(), &self.0[range]);
        match at.round {
            0 => pack(values_mut(scaling.wire.dtype(), body), Values::F32(slice), scaling.pre),
            _ => body.copy_from_slice(bytemuck::cast_slice(slice)),
        }
    }

    fn unpack(mut self, at: &At, messages: &DataMessages) -> Next<Self> {
        if at.round > 0 {
            fill(&mut self.0, &[], (&at.pattern(), 1), messages);
        } else {
            let own = &mut self.0[at.pattern().takes(0, at.slot)];
            let packed = packed(at, |target, pre| pack(target, Values::F32(own), pre));
            let parts = contributions(at, &packed, messages);
            sum_contributions(own, &parts, summed(at), Fold::Replace);
        }
        at.go_on(self, |Self(values)| values)
    }
}

/// The contribution of this member to its own part, in the dtype of the wire.
fn packed(at: &At, fill: impl FnOnce(ValuesMut<'_>, Divisor)) -> Vec<u64> {
    let (bytes, scaling) = (at.pattern().bytes_from(0, at.slot), at.scaling());
    let mut packed = vec![0_u64; bytes.div_ceil(8)];
    let own = &mut bytemuck::cast_slice_mut(&mut packed)[..bytes];
    fill(values_mut(scaling.wire.dtype(), own), scaling.pre);
    packed
}

/// The contributions of all members to this member's part, in slot order; `own` is the one of this member, packed.
fn contributions<'a>(at: &At, own: &'a [u64], messages: &'a DataMessages) -> Vec<Values<'a>> {
    let (bytes, dtype) = (at.pattern().bytes_from(0, at.slot), summed(at).wire.dtype());
    let own = &bytemuck::cast_slice(own)[..bytes];
    let of = |slot| if slot == at.slot { own } else { messages.bytes(slot) };
    (0..at.ranks.len()).map(|slot| values(dtype, of(slot))).collect()
}

/// How contributions are scaled that were divided when they were packed.
fn summed(at: &At) -> Scaling {
    Scaling { pre: Divisor::ONE, ..at.scaling() }
}
