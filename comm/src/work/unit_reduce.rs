//! The runtime's reduce-scatter: gradients are read where they lie, divided, rounded to the wire, summed in member
//! order and folded into the owner's partial, block by block.

use std::ops::Range;
use std::sync::Arc;

use hsdp_kernels::{
    DisjointVec, Fold, GradientValues, Values, contribute, first_non_finite, settle,
};
use hsdp_sharding::{Piece, Role, UnitLayout};

use super::{BLOCK_ELEMENTS, Meter, Work, owned_blocks, pieces_in, take};
use crate::sync::Mutex;
use crate::{NonFiniteAt, Reduced, Scaling};

/// Elements that are summed at a time: their sums stay in the first-level cache, beside what is added to them.
const STEP: usize = 1 << 10;

/// What a parameter without a gradient contributes.
static ZEROS: [f32; STEP] = [0.0; STEP];

/// What a member brings: its gradients, to be read where they lie, and its partial, to be filled.
pub(crate) struct UnitReduceDeposit {
    pub(crate) layout: Arc<UnitLayout>,
    pub(crate) gradients: Vec<Option<Arc<dyn GradientValues>>>,
    pub(crate) partial: Vec<f32>,
    pub(crate) fold: Fold,
}

/// Every member's gradients, summed into the partial of whoever owns them.
pub(crate) struct UnitReduce {
    gradients: Vec<Vec<Option<Arc<dyn GradientValues>>>>,
    partials: Vec<DisjointVec<f32>>,
    folds: Vec<Fold>,
    scaling: Scaling,
    /// What each trainable shard holds.
    pieces: Vec<Vec<Piece>>,
    /// Whose partial, and which elements of it. They cover all partials once.
    blocks: Vec<(usize, Range<usize>)>,
    /// By owner: the first element of its partial that was found not to be finite, and why.
    found: Vec<Mutex<Option<(usize, NonFiniteAt)>>>,
}

impl UnitReduce {
    /// # Errors
    /// If the members do not have the same layout.
    pub(crate) fn new(members: Vec<UnitReduceDeposit>, scaling: Scaling) -> Result<Self, String> {
        let layout = Arc::clone(&members[0].layout);
        if members.iter().any(|member| member.layout != layout) {
            return Err("ranks have different layouts of one unit".to_owned());
        }
        let owned = (0..members.len()).map(|owner| (owner, 0..layout.trainable().shard_len));
        let blocks = owned_blocks(owned, BLOCK_ELEMENTS);
        let pieces = (0..members.len()).map(|slot| trainable_pieces(&layout, slot)).collect();
        let found = members.iter().map(|_| Mutex::default()).collect();
        let (gradients, partials, folds) = (vec![], vec![], vec![]);
        let mut work = Self { gradients, partials, folds, scaling, pieces, blocks, found };
        for UnitReduceDeposit { gradients, partial, fold, .. } in members {
            work.gradients.push(gradients);
            work.partials.push(partial.into());
            work.folds.push(fold);
        }
        Ok(work)
    }

    /// Sums what belongs into a part of an owner's partial, from `start`, and folds it in.
    fn reduce(&self, owner: usize, start: usize, partial: &mut [f32], meter: &Meter<'_>) {
        let range = start..start + partial.len();
        let mut sums = [0.0; STEP];
        let sums = &mut sums[..range.len()];
        for (param, place, part) in pieces_in(&self.pieces[owner], range) {
            let place = place.start - start..place.end - start;
            self.sum(&mut sums[place], param, part, meter);
        }
        settle(partial, sums, self.scaling.post, self.folds[owner]);
        // While it is in the cache: later, or elsewhere, nobody could say whose it was.
        if let Some(offset) = first_non_finite(partial) {
            self.note(owner, start + offset, meter);
        }
    }

    /// Adds up the members' contributions to `range` of a parameter.
    fn sum(&self, sum: &mut [f32], param: usize, range: Range<usize>, meter: &Meter<'_>) {
        let Scaling { wire, pre, .. } = self.scaling;
        for (slot, gradients) in self.gradients.iter().enumerate() {
            let fold = if slot == 0 { Fold::Replace } else { Fold::Add };
            let Some(gradient) = &gradients[param] else {
                contribute(sum, Values::F32(&ZEROS[..sum.len()]), pre, wire, fold);
                continue;
            };
            meter.lent_by(slot, || {
                let mut visits = 0;
                gradient.read(range.clone(), &mut |values| {
                    visits += 1;
                    contribute(sum, values, pre, wire, fold);
                });
                assert!(
                    visits == 1,
                    "the gradient of parameter {param} was lent {visits} times, not once"
                );
            });
        }
    }

    /// Notes why the element at `place` of a partial is not finite, unless one before it is known.
    fn note(&self, owner: usize, place: usize, meter: &Meter<'_>) {
        let Some((param, _, part)) = pieces_in(&self.pieces[owner], place..place + 1).next() else {
            return;
        };
        let is_culprit = |slot: &usize| self.is_not_finite(*slot, param, part.start, meter);
        let from = (0..self.gradients.len()).find(is_culprit).map(|slot| meter.rank(slot));
        let mut found = self.found[owner].lock();
        if found.is_none_or(|(first, _)| place < first) {
            *found = Some((place, NonFiniteAt { param, from }));
        }
    }

    /// Whether what a member contributes to one element of a parameter is not finite on the wire.
    fn is_not_finite(&self, slot: usize, param: usize, at: usize, meter: &Meter<'_>) -> bool {
        let Some(gradient) = &self.gradients[slot][param] else { return false };
        let Scaling { wire, pre, .. } = self.scaling;
        let mut contribution = [0.0];
        meter.lent_by(slot, || {
            gradient.read(at..at + 1, &mut |values| {
                contribute(&mut contribution, values, pre, wire, Fold::Replace);
            });
        });
        !contribution[0].is_finite()
    }
}

impl Work for UnitReduce {
    type Output = Reduced;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn bytes(&self) -> usize {
        // Most of the work is to read the gradients.
        self.partials[0].len() * self.partials.len() * self.partials.len() * size_of::<f32>()
    }

    /// Gradients are lent by code of users.
    fn calls_users(&self) -> bool {
        true
    }

    /// Bytes count with the padding, and with gradients that are absent: a wire would carry their zeros.
    fn run(&self, block: usize, meter: &Meter<'_>) {
        let (owner, range) = &self.blocks[block];
        // SAFETY: CO-2, blocks of one partial do not overlap, and each is run once.
        let partial = unsafe { take(&self.partials[*owner], range.clone()) };
        for (partial, start) in partial.chunks_mut(STEP).zip((range.start..).step_by(STEP)) {
            self.reduce(*owner, start, partial, meter);
        }
        for from in 0..self.gradients.len() {
            meter.received(*owner, from, range.len(), self.scaling.wire.dtype().size_bytes());
        }
    }

    fn finish(self) -> Vec<Reduced> {
        let non_finite = self.found.into_iter().map(|found| found.into_inner().map(|(_, it)| it));
        let partials = self.partials.into_iter().map(DisjointVec::into_vec);
        partials
            .zip(non_finite)
            .map(|(partial, non_finite)| Reduced { partial, non_finite })
            .collect()
    }
}

/// The pieces that gradients have, which come before the frozen ones in a shard.
fn trainable_pieces(layout: &UnitLayout, slot: usize) -> Vec<Piece> {
    let trainable = |piece: &Piece| layout.params()[piece.param].role == Role::Trainable;
    layout.pieces(slot).filter(trainable).collect()
}
