//! What travels of the calls on whole units: shards, packed gradients, slices of partials.

use std::hash::Hash as _;
use std::ops::Range;

use half::{bf16, f16};
use hsdp_kernels::{
    Divisor, Fold, GradientValues, HostBuffer, Values, ValuesMut, Wire, contribute,
    copy_all_past_caches, pack, read_once, sum_contributions,
};
use hsdp_sharding::{DType, Role, UnitLayout, balanced};
use xxhash_rust::xxh3::Xxh3;

use super::passing::fill_slices;
use super::statement::Form;
use super::travels::{At, Parcels, Travels, Turn};
use crate::bytes::{bytes_of, values, values_mut};
use crate::execute::{Scaled, UnitGatherDeposit, UnitReduceDeposit};
use crate::{Error, NonFiniteAt, Reduced, Scaling};

pub(crate) fn digest(layout: &UnitLayout) -> u64 {
    let mut hash = Xxh3::new();
    layout.hash(&mut hash);
    hash.digest()
}

/// Of a gather: the shard, with its padding.
impl Travels for UnitGatherDeposit {
    type Output = Vec<HostBuffer>;

    fn form(&self) -> Form {
        Form { function: 6, layout: digest(&self.layout), note: 0 }
    }

    fn bytes_for(&self, _at: &At, _to: usize) -> usize {
        self.shard.len() * self.shard.dtype().size_bytes()
    }

    fn pack(&self, _at: &At, _to: usize, body: &mut [u8]) {
        body.copy_from_slice(bytes_of(self.shard.values()));
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        parcels.check(at, |_| self.bytes_for(at, at.slot))
    }

    fn unpack(self, at: &At, parcels: &Parcels) -> Turn<Self> {
        let Self { layout, shard, mut targets } = self;
        let bytes = layout.full_len() * shard.dtype().size_bytes();
        let copy = if bytes > PAST_CACHES { past_caches } else { through_caches };
        for from in 0..at.members() {
            let is_own = from == at.slot;
            let source =
                if is_own { shard.values() } else { values(shard.dtype(), parcels.bytes(from)) };
            for piece in layout.pieces(from) {
                let range = piece.param_start..piece.param_start + piece.len;
                let target = targets[piece.param].values_mut().slice(range);
                copy(target, source.slice(piece.shard_range()));
            }
        }
        Turn::Done(targets)
    }
}

/// A unit of more bytes is written past the caches: little of it would still be there when the next one comes.
const PAST_CACHES: usize = 2 << 20;

fn past_caches(target: ValuesMut<'_>, source: Values<'_>) {
    copy_all_past_caches([(target, source)]);
}

fn through_caches(target: ValuesMut<'_>, source: Values<'_>) {
    target.copy_from(source);
}

/// The pieces of a trainable shard: of which parameter, where in it, and where in the shard.
fn pieces(
    layout: &UnitLayout,
    slot: usize,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let trainable =
        |piece: &hsdp_sharding::Piece| layout.params()[piece.param].role == Role::Trainable;
    let all = layout.pieces(slot).take_while(trainable);
    all.map(|it| (it.param, it.param_start..it.param_start + it.len, it.shard_range()))
}

impl UnitReduceDeposit {
    fn wire(at: &At) -> Wire {
        at.descriptor.scaling.expect("a reduction of gradients has one").wire
    }

    fn shard_bytes(&self, at: &At) -> usize {
        self.layout.trainable().shard_len * Self::wire(at).dtype().size_bytes()
    }

    /// Who made an element of the sum not finite, from a member's packed shard.
    fn non_finite(&self, at: &At, shards: &[Values<'_>], place: usize) -> Option<NonFiniteAt> {
        let (param, ..) =
            pieces(&self.layout, at.slot).find(|(_, _, shard)| shard.contains(&place))?;
        let is_culprit = |shard: &Values<'_>| {
            let mut contribution = [0.0];
            let value = shard.slice(place..place + 1);
            contribute(&mut contribution, value, Divisor::ONE, Wire::F32, Fold::Replace);
            !contribution[0].is_finite()
        };
        let from = shards.iter().position(is_culprit).map(|slot| at.ranks[slot]);
        Some(NonFiniteAt { param, from })
    }
}

/// Of a reduction: the gradients of each member's shard, divided and rounded to the wire, with zeros for padding and for gradients
/// that are absent.
impl Travels for UnitReduceDeposit {
    type Output = Reduced;

    fn form(&self) -> Form {
        Form { function: 7, layout: digest(&self.layout), note: 0 }
    }

    fn bytes_for(&self, at: &At, _to: usize) -> usize {
        self.shard_bytes(at)
    }

    fn pack(&self, at: &At, to: usize, body: &mut [u8]) {
        let scaling = at.descriptor.scaling.expect("a reduction of gradients has one");
        pack_shard(self, scaling, to, values_mut(scaling.wire.dtype(), body));
    }

    fn is_for_all(&self, _at: &At) -> bool {
        false
    }

    fn keep(&mut self, at: &At) -> Result<(), Error> {
        let scaling = at.descriptor.scaling.expect("a reduction of gradients has one");
        let (bytes, dtype) = (self.shard_bytes(at), scaling.wire.dtype());
        let mut packed = vec![0_u64; bytes.div_ceil(8)];
        let own = &mut bytemuck::cast_slice_mut(&mut packed)[..bytes];
        pack_shard(self, scaling, at.slot, values_mut(dtype, own));
        self.packed = packed;
        self.gradients.clear();
        Ok(())
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        parcels.check(at, |_| self.shard_bytes(at))
    }

    fn unpack(mut self, at: &At, parcels: &Parcels) -> Turn<Self> {
        let scaling = at.descriptor.scaling.expect("a reduction of gradients has one");
        let dtype = scaling.wire.dtype();
        let own = &bytemuck::cast_slice(&self.packed)[..self.shard_bytes(at)];
        let of = |slot| if slot == at.slot { own } else { parcels.bytes(slot) };
        let shards: Vec<_> = (0..at.members()).map(|slot| values(dtype, of(slot))).collect();
        let mut partial = std::mem::take(&mut self.partial);
        let summed = Scaling { pre: Divisor::ONE, ..scaling };
        let mut first = None;
        for (_, _, place) in pieces(&self.layout, at.slot) {
            let parts: Vec<_> = shards.iter().map(|it| it.slice(place.clone())).collect();
            let found = sum_contributions(&mut partial[place.clone()], &parts, summed, self.fold);
            first = first.or_else(|| Some(place.start + found?));
        }
        if self.fold == Fold::Replace {
            pad(&mut partial, pieces(&self.layout, at.slot).map(|(_, _, place)| place));
        }
        let non_finite = first.and_then(|place| self.non_finite(at, &shards, place));
        Turn::Done(Reduced { partial, non_finite })
    }
}

/// Writes zeros between the places, which are in order.
fn pad(partial: &mut [f32], places: impl Iterator<Item = Range<usize>>) {
    let mut end = 0;
    for place in places {
        partial[end..place.start].fill(0.0);
        end = place.end;
    }
    partial[end..].fill(0.0);
}

/// Writes what belongs into the shard of the member in slot `to`.
fn pack_shard(own: &UnitReduceDeposit, scaling: Scaling, to: usize, mut shard: ValuesMut<'_>) {
    let mut end = 0;
    for (param, range, place) in pieces(&own.layout, to) {
        zero(shard.reborrow().slice(end..place.start));
        end = place.end;
        let target = shard.reborrow().slice(place);
        match &own.gradients[param] {
            Some(gradient) => pack_gradient(&**gradient, (param, range), scaling, target),
            None => zero(target),
        }
    }
    let len = shard.len();
    zero(shard.slice(end..len));
}

fn pack_gradient(
    gradient: &dyn GradientValues,
    (param, range): (usize, Range<usize>),
    scaling: Scaling,
    target: ValuesMut<'_>,
) {
    let mut target = Some(target);
    read_once(gradient, param, range, &mut |values| {
        if let Some(target) = target.take() {
            pack(target, values, scaling.pre);
        }
    });
}

fn zero(values: ValuesMut<'_>) {
    match values {
        ValuesMut::F32(values) => values.fill(0.0),
        ValuesMut::F16(values) => values.fill(f16::ZERO),
        ValuesMut::BF16(values) => values.fill(bf16::ZERO),
    }
}

/// Of a scaled sum: to each member first its slice, divided and rounded to the wire; then the finished slice of this member to
/// all, in f32.
impl Travels for Scaled {
    type Output = Vec<f32>;

    fn form(&self) -> Form {
        Form { function: 8, ..Form::default() }
    }

    fn bytes_for(&self, at: &At, to: usize) -> usize {
        let slot = if at.round == 0 { to } else { at.slot };
        balanced(self.0.len(), at.members(), slot).len() * Self::dtype(at).size_bytes()
    }

    fn pack(&self, at: &At, to: usize, body: &mut [u8]) {
        let (scaling, slot) = (Self::scaling(at), if at.round == 0 { to } else { at.slot });
        let slice = Values::F32(&self.0[balanced(self.0.len(), at.members(), slot)]);
        let divisor = if at.round == 0 { scaling.pre } else { Divisor::ONE };
        pack(values_mut(Self::dtype(at), body), slice, divisor);
    }

    fn is_for_all(&self, at: &At) -> bool {
        at.round > 0
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        let slot = |from| if at.round == 0 { at.slot } else { from };
        let count = |from| balanced(self.0.len(), at.members(), slot(from)).len();
        parcels.check(at, |from| count(from) * Self::dtype(at).size_bytes())
    }

    fn unpack(mut self, at: &At, parcels: &Parcels) -> Turn<Self> {
        if at.round > 0 {
            fill_slices(&mut self.0, at, parcels);
            return Turn::Done(self.0);
        }
        let (scaling, dtype) = (Self::scaling(at), Self::dtype(at));
        let own = balanced(self.0.len(), at.members(), at.slot);
        let mut packed = vec![0_u64; (own.len() * dtype.size_bytes()).div_ceil(8)];
        let packed = &mut bytemuck::cast_slice_mut(&mut packed)[..own.len() * dtype.size_bytes()];
        pack(values_mut(dtype, packed), Values::F32(&self.0[own.clone()]), scaling.pre);
        let of = |slot| if slot == at.slot { &*packed } else { parcels.bytes(slot) };
        let parts: Vec<_> = (0..at.members()).map(|slot| values(dtype, of(slot))).collect();
        let summed = Scaling { pre: Divisor::ONE, ..scaling };
        sum_contributions(&mut self.0[own], &parts, summed, Fold::Replace);
        Turn::Again(self)
    }
}

impl Scaled {
    fn scaling(at: &At) -> Scaling {
        at.descriptor.scaling.expect("a scaled sum has one")
    }

    /// In which elements travel in this round.
    fn dtype(at: &At) -> DType {
        if at.round == 0 { Self::scaling(at).wire.dtype() } else { DType::F32 }
    }
}
