//! The runtime's reduce-scatter: gradients are read where they lie, divided, rounded to the wire,
//! summed in member order and folded into the owner's partial, block by block.

use std::mem;
use std::ops::ControlFlow::Break;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use hsdp_kernels::{
    DisjointVec, Divisor, FUSED, Fold, GradientValues, Values, ValuesMut, contribute,
    contribute_all, first_non_finite, pack, read_once, settle, sum_contributions,
};
use hsdp_sharding::{Piece, Rank, Role, UnitLayout};
use smallvec::SmallVec;

use super::{
    AfterRound, At, Contribute, Cuts, LAYOUTS_DIFFER, MOST_ELEMENTS, Meter, Outputs, Received,
    Work, block_elements, pieces_in, take,
};
use crate::bytes::{values, values_mut};
use crate::pattern::Pattern;
use crate::sync::Mutex;
use crate::{Error, Scaling};

/// One member's contribution to the reduction of a unit's gradients.
#[derive(Clone, Debug)]
pub struct Contribution {
    /// The gradients, by index of the parameter in the unit. `None` contributes zeros; frozen
    /// parameters have none. Gradients are read in place, and dropped before
    /// [`Pending::wait`](crate::Pending::wait) returns their sum.
    pub gradients: Vec<Option<Arc<dyn GradientValues>>>,
    /// The divisors and the wire dtype; the same on all members.
    pub scaling: Scaling,
}

/// The buffer for a member's part of a reduction.
#[derive(Clone, Debug, PartialEq)]
pub struct Accumulator {
    /// `[layout.trainable().shard_len]`, f32.
    pub partial: Vec<f32>,
    /// Whether the sum replaces the partial or is added to it. Members may differ in it.
    pub fold: Fold,
}

/// A member's part of a reduction.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduced {
    /// The accumulator's partial, with the sum in it.
    pub partial: Vec<f32>,
    /// The first element of it that is not finite, if there is one.
    pub non_finite: Option<NonFiniteAt>,
}

/// The origin of an infinity or a NaN in a partial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFiniteAt {
    /// The index of the parameter in its unit.
    pub param: usize,
    /// The first member whose contribution was not finite on the wire; `None` if all were finite
    /// and only their sum is not.
    pub from: Option<Rank>,
}

/// Elements that more than [`FUSED`] members sum at a time: their sums stay in the first-level
/// cache, beside what is added to them.
const STEP: usize = 1 << 10;

/// The contribution of a parameter without a gradient.
static ZEROS: [f32; MOST_ELEMENTS] = [0.0; MOST_ELEMENTS];

/// The contribution of a member: its gradients, to be read where they lie, and its partial, to be
/// filled.
pub(crate) struct UnitReduceContribution {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) gradients: Vec<Option<Arc<dyn GradientValues>>>,
    pub(crate) partial: Vec<f32>,
    pub(crate) fold: Fold,
    /// The contribution to its own shard, in the dtype of the wire, where members share no memory.
    /// Else nothing.
    pub(crate) packed: Vec<u64>,
}

impl Contribute for UnitReduceContribution {
    type Gets = Reduced;
    type Work = UnitReduce;
    const FUNCTION: u8 = 7;

    fn layout(&self) -> Option<&UnitLayout> {
        Some(&self.layout)
    }

    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        &mut self.gradients
    }

    fn assemble(all: Vec<Self>, at: At<'_>) -> Result<UnitReduce, String> {
        let layout = Arc::clone(&all[0].layout);
        if all.iter().any(|member| member.layout != layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let member = |it: Self| ReducingMember {
            gradients: it.gradients,
            partial: DisjointVec::from(it.partial),
            fold: it.fold,
            found: Mutex::default(),
        };
        let members: Vec<_> = all.into_iter().map(member).collect();
        let len = layout.trainable().shard_len;
        let cuts = Cuts { len, block_len: block_elements(members.len() * len) };
        Ok(UnitReduce { members, scaling: at.scaling(), layout, cuts })
    }

    /// Writes the gradients of a member's shard, divided and rounded to the wire, with zeros for
    /// padding and for gradients that are absent.
    fn pack(&self, at: At<'_>, to: usize, _range: Range<usize>, body: &mut [u8]) {
        let scaling = at.scaling();
        self.pack_shard(scaling.pre, to, values_mut(scaling.wire.dtype(), body));
    }

    fn keep(&mut self, at: At<'_>) -> Result<(), Error> {
        let pattern = at.pattern();
        self.packed = packed(at, &pattern, |own, pre| self.pack_shard(pre, at.slot, own));
        self.gradients.clear();
        Ok(())
    }

    fn unpack(self, at: At<'_>, received: &Received<'_>) -> AfterRound<Self> {
        let Self { layout, gradients: _, mut partial, fold, packed } = self;
        let shards = contributions(at, &at.pattern(), &packed, received);
        let scaling = summed(at);
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

    fn alone(self, _at: At<'_>) -> Reduced {
        let Self { mut partial, fold, .. } = self;
        if fold == Fold::Replace {
            partial.fill(0.0);
        }
        Reduced { partial, non_finite: None }
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

/// Returns the parts of a trainable shard, in order, with their places: parts of parameters, and
/// padding before and after each.
fn places(layout: &UnitLayout, slot: usize) -> impl Iterator<Item = (Option<Piece>, Range<usize>)> {
    let trainable = |piece: &Piece| layout.params()[piece.param].role == Role::Trainable;
    let pieces = layout.pieces(slot).take_while(trainable).map(Some).chain([None]);
    let len = layout.trainable().shard_len;
    let mut end = 0;
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

/// Every member's gradients, summed into the partials of their owners.
pub(crate) struct UnitReduce {
    /// Members by slot.
    members: Vec<ReducingMember>,
    scaling: Scaling,
    layout: Arc<UnitLayout>,
    /// Of the partials.
    cuts: Cuts,
}

/// A member's gradients and partial, and the first element that is not finite.
struct ReducingMember {
    gradients: Vec<Option<Arc<dyn GradientValues>>>,
    partial: DisjointVec<f32>,
    fold: Fold,
    /// The first element of the partial that was found not to be finite, and why.
    found: Mutex<Option<(usize, NonFiniteAt)>>,
}

impl UnitReduce {
    /// Returns the pieces of a shard that gradients have, which come before the frozen ones.
    fn pieces(&self, slot: usize) -> impl Iterator<Item = Piece> {
        let trainable = |piece: &Piece| self.layout.params()[piece.param].role == Role::Trainable;
        self.layout.pieces(slot).take_while(trainable)
    }

    /// Fills the place between pieces, where there are no gradients.
    fn pad(&self, owner: usize, padding: &mut [f32]) {
        if self.members[owner].fold == Fold::Replace {
            padding.fill(0.0);
        }
    }

    fn reduce_piece(
        &self,
        owner: usize,
        gradient: &Gradient,
        partial: &mut [f32],
        meter: &Meter<'_>,
    ) {
        let scaling = self.scaling;
        let fold = self.members[owner].fold;
        let mut first = None;
        if self.members.len() <= FUSED {
            self.lend(0..self.members.len(), &[], gradient, meter, &mut |contributions| {
                first = sum_contributions(partial, contributions, scaling, fold);
            });
        } else {
            let mut sums = [0.0; STEP];
            for (partial, start) in partial.chunks_mut(STEP).zip((0..).step_by(STEP)) {
                let sums = &mut sums[..partial.len()];
                let begin = gradient.range.start + start;
                let range = begin..begin + sums.len();
                self.sum(sums, &Gradient { param: gradient.param, range, start: 0 }, meter);
                settle(partial, sums, scaling.post, fold);
                first = first.or_else(|| Some(start + first_non_finite(partial)?));
            }
        }
        // While the members' gradients are still here: later, the member that it came from could
        // not be found.
        if let Some(offset) = first {
            self.note(owner, gradient, offset, meter);
        }
    }

    /// Calls `act` while a few members, at most [`FUSED`], lend their part of a gradient at once:
    /// those before `slots` have `lent` theirs.
    fn lend(
        &self,
        mut slots: Range<usize>,
        lent: &[Values<'_>],
        gradient: &Gradient,
        meter: &Meter<'_>,
        act: &mut dyn FnMut(&[Values<'_>]),
    ) {
        let Some(slot) = slots.next() else {
            return act(lent);
        };
        let mut lend_rest = |values: Values<'_>| {
            let lent = lent.iter().copied().chain([values]);
            let lent: SmallVec<[Values<'_>; FUSED]> = lent.collect();
            self.lend(slots.clone(), &lent, gradient, meter, act);
        };
        match &self.members[slot].gradients[gradient.param] {
            None => lend_rest(Values::F32(&ZEROS[..gradient.range.len()])),
            Some(values) => {
                let Gradient { param, range, .. } = gradient;
                let lend = || read_once(&**values, *param, range.clone(), &mut lend_rest);
                meter.lent_by(slot, lend);
            }
        }
    }

    /// Adds up the members' contributions to elements of a parameter, a few members at a time.
    fn sum(&self, sum: &mut [f32], gradient: &Gradient, meter: &Meter<'_>) {
        let Scaling { wire, pre, .. } = self.scaling;
        for first in (0..self.members.len()).step_by(FUSED) {
            let fold = if first == 0 { Fold::Replace } else { Fold::Add };
            let few = first..self.members.len().min(first + FUSED);
            self.lend(few, &[], gradient, meter, &mut |contributions| {
                contribute_all(sum, contributions, pre, wire, fold);
            });
        }
    }

    /// Notes why an element of a piece is not finite, unless one before it is known.
    fn note(&self, owner: usize, gradient: &Gradient, offset: usize, meter: &Meter<'_>) {
        let param = gradient.param;
        let place = gradient.start + offset;
        let at = gradient.range.start + offset;
        let is_culprit = |slot: &usize| self.is_not_finite(*slot, param, at, meter);
        let from = (0..self.members.len()).find(is_culprit).map(|slot| meter.rank(slot));
        let mut found = self.members[owner].found.lock();
        if found.is_none_or(|(first, _)| place < first) {
            *found = Some((place, NonFiniteAt { param, from }));
        }
    }

    /// Returns whether what a member contributes to one element of a parameter is not finite on the
    /// wire.
    fn is_not_finite(&self, slot: usize, param: usize, at: usize, meter: &Meter<'_>) -> bool {
        let Some(gradient) = &self.members[slot].gradients[param] else { return false };
        let Scaling { wire, pre, .. } = self.scaling;
        let mut contribution = [0.0];
        meter.lent_by(slot, || {
            read_once(&**gradient, param, at..at + 1, &mut |values| {
                contribute(&mut contribution, values, pre, wire, Fold::Replace);
            });
        });
        !contribution[0].is_finite()
    }
}

impl Work for UnitReduce {
    type Gets = Reduced;

    fn blocks(&self) -> usize {
        self.members.len() * self.cuts.each()
    }

    fn bytes(&self) -> usize {
        // Most of the work is to read the gradients.
        self.cuts.len * self.members.len().pow(2) * size_of::<f32>()
    }

    /// Gradients are lent by code of users.
    fn calls_users(&self) -> bool {
        true
    }

    /// Sums what belongs into a block of its owner's partial, and folds it in.
    fn run(&self, block: usize, meter: &Meter<'_>) {
        let (owner, range) = self.cuts.block(block);
        // SAFETY: CO-2, blocks of one partial do not overlap, and each is run once.
        let partial = unsafe { take(&self.members[owner].partial, range.clone()) };
        let start = range.start;
        let mut filled = 0;
        for (param, place, part) in pieces_in(self.pieces(owner), range) {
            let (start, place) = (place.start, place.start - start..place.end - start);
            self.pad(owner, &mut partial[filled..place.start]);
            filled = place.end;
            let gradient = Gradient { param, range: part, start };
            self.reduce_piece(owner, &gradient, &mut partial[place], meter);
        }
        self.pad(owner, &mut partial[filled..]);
    }

    fn finish(self) -> Outputs<Reduced> {
        let reduced = |ReducingMember { partial, found, .. }: ReducingMember| Reduced {
            partial: partial.into_vec(),
            non_finite: found.into_inner().map(|(_, non_finite)| non_finite),
        };
        self.members.into_iter().map(reduced).collect()
    }
}

/// Elements of a parameter whose gradients belong into a partial.
struct Gradient {
    param: usize,
    range: Range<usize>,
    /// Where they begin in the partial.
    start: usize,
}

/// Makes the contribution of this member to its own part, in the dtype of the wire.
pub(super) fn packed(
    at: At<'_>,
    pattern: &Pattern<'_>,
    fill: impl FnOnce(ValuesMut<'_>, Divisor),
) -> Vec<u64> {
    let bytes = pattern.bytes_from(0, at.slot);
    let scaling = at.scaling();
    let mut packed = vec![0_u64; bytes.div_ceil(8)];
    let own = &mut bytemuck::cast_slice_mut(&mut packed)[..bytes];
    fill(values_mut(scaling.wire.dtype(), own), scaling.pre);
    packed
}

/// Returns the contributions of all members to this member's part, in slot order; `own` is the one
/// of this member, packed.
pub(super) fn contributions<'a>(
    at: At<'_>,
    pattern: &Pattern<'_>,
    own: &'a [u64],
    received: &'a Received<'_>,
) -> Vec<Values<'a>> {
    let bytes = pattern.bytes_from(0, at.slot);
    let dtype = summed(at).wire.dtype();
    let own = &bytemuck::cast_slice(own)[..bytes];
    let of = |slot| if slot == at.slot { own } else { received.bytes(slot) };
    (0..at.ranks.len()).map(|slot| values(dtype, of(slot))).collect()
}

/// Returns the scaling of contributions that were divided when they were packed.
pub(super) fn summed(at: At<'_>) -> Scaling {
    Scaling { pre: Divisor::ONE, ..at.scaling() }
}
