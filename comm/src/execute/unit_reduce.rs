//! The runtime's reduce-scatter: gradients are read where they lie, divided, rounded to the wire, summed in member
//! order and folded into the owner's partial, block by block.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{
    DisjointVec, FUSED, Fold, GradientValues, Values, contribute, contribute_all, first_non_finite,
    read_once, settle, sum_contributions,
};
use hsdp_sharding::{Piece, Role, UnitLayout};
use smallvec::SmallVec;

use super::unit_buffers::{NonFiniteAt, Reduced};
use super::{
    Buffers, Cuts, LAYOUTS_DIFFER, MOST_ELEMENTS, Meter, Outputs, Work, block_elements, pieces_in,
    take,
};
use crate::Scaling;
use crate::pattern::Pattern;
use crate::sync::Mutex;

/// Elements that more than [`FUSED`] members sum at a time: their sums stay in the first-level cache, beside what is added
/// to them.
const STEP: usize = 1 << 10;

/// The contribution of a parameter without a gradient.
static ZEROS: [f32; MOST_ELEMENTS] = [0.0; MOST_ELEMENTS];

/// The contribution of a member: its gradients, to be read where they lie, and its partial, to be filled.
pub(crate) struct UnitReduceContribution {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) gradients: Vec<Option<Arc<dyn GradientValues>>>,
    pub(crate) partial: Vec<f32>,
    pub(crate) fold: Fold,
    /// The contribution to its own shard, in the dtype of the wire, where members share no memory. Else nothing.
    pub(crate) packed: Vec<u64>,
}

impl Buffers for UnitReduceContribution {
    type Output = Reduced;

    fn gradients(&mut self) -> &mut [Option<Arc<dyn GradientValues>>] {
        &mut self.gradients
    }

    fn output_alone(self, _pattern: &Pattern<'_>) -> Reduced {
        let Self { mut partial, fold, .. } = self;
        if fold == Fold::Replace {
            partial.fill(0.0);
        }
        Reduced { partial, non_finite: None }
    }
}

/// Every member's gradients, summed into the partials of their owners.
pub(crate) struct UnitReduce {
    /// By slot.
    members: Vec<Member>,
    scaling: Scaling,
    layout: Arc<UnitLayout>,
    /// Of the partials.
    cuts: Cuts,
}

/// A member's gradients and partial, and the first element that is not finite.
struct Member {
    gradients: Vec<Option<Arc<dyn GradientValues>>>,
    partial: DisjointVec<f32>,
    fold: Fold,
    /// The first element of the partial that was found not to be finite, and why.
    found: Mutex<Option<(usize, NonFiniteAt)>>,
}

impl UnitReduce {
    /// # Errors
    /// If the members do not have the same layout.
    pub(crate) fn new(
        members: Vec<UnitReduceContribution>,
        scaling: Scaling,
    ) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        if members.iter().any(|member| member.layout != layout) {
            return Err(LAYOUTS_DIFFER.to_owned());
        }
        let member = |UnitReduceContribution { gradients, partial, fold, .. }| Member {
            gradients,
            partial: DisjointVec::from(partial),
            fold,
            found: Mutex::default(),
        };
        let members: Vec<_> = members.into_iter().map(member).collect();
        let len = layout.trainable().shard_len;
        let cuts = Cuts { len, block_len: block_elements(members.len() * len) };
        Ok(Self { members, scaling, layout, cuts })
    }

    /// The pieces of a shard that gradients have, which come before the frozen ones.
    fn pieces(&self, slot: usize) -> impl Iterator<Item = Piece> {
        let trainable = |piece: &Piece| self.layout.params()[piece.param].role == Role::Trainable;
        self.layout.pieces(slot).take_while(trainable)
    }

    /// Between pieces there are no gradients.
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
        let (scaling, fold) = (self.scaling, self.members[owner].fold);
        let mut first = None;
        if self.members.len() <= FUSED {
            self.lend((0..self.members.len(), &[]), gradient, meter, &mut |contributions| {
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
        // While the members' gradients are still here: later, the member that it came from could not be found.
        if let Some(offset) = first {
            self.note(owner, gradient, offset, meter);
        }
    }

    /// Calls `act` while a few members, at most [`FUSED`], lend their part of a gradient at once: those before `slots` have `lent` theirs.
    fn lend(
        &self,
        (mut slots, lent): (Range<usize>, &[Values<'_>]),
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
            self.lend((slots.clone(), &lent), gradient, meter, act);
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
            self.lend((few, &[]), gradient, meter, &mut |contributions| {
                contribute_all(sum, contributions, pre, wire, fold);
            });
        }
    }

    /// Notes why an element of a piece is not finite, unless one before it is known.
    fn note(&self, owner: usize, gradient: &Gradient, offset: usize, meter: &Meter<'_>) {
        let (param, place) = (gradient.param, gradient.start + offset);
        let at = gradient.range.start + offset;
        let is_culprit = |slot: &usize| self.is_not_finite(*slot, param, at, meter);
        let from = (0..self.members.len()).find(is_culprit).map(|slot| meter.rank(slot));
        let mut found = self.members[owner].found.lock();
        if found.is_none_or(|(first, _)| place < first) {
            *found = Some((place, NonFiniteAt { param, from }));
        }
    }

    /// Whether what a member contributes to one element of a parameter is not finite on the wire.
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
    type Output = Reduced;

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
        let (start, mut filled) = (range.start, 0);
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
        let reduced = |Member { partial, found, .. }: Member| Reduced {
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
