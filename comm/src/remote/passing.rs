//! What travels of the operations that pass vectors on, and of all_reduce.

use hsdp_kernels::Element;
use hsdp_sharding::balanced;

use super::exchange::reduce_in_place;
use super::statement::Form;
use super::travels::{At, Parcels, Travels, Turn};
use crate::Op;
use crate::collectives::sources_of;
use crate::execute::Handing;

/// Of a barrier: that a member is there.
impl Travels for () {
    type Output = ();

    fn form(&self) -> Form {
        Form { function: 3, ..Form::default() }
    }

    fn unpack(self, _at: &At, _parcels: &Parcels) -> Turn<Self> {
        Turn::Done(())
    }
}

/// Of a permutation: what is handed over, to whom it is.
impl<T: Element> Travels for Handing<T> {
    type Output = Vec<T>;

    fn form(&self) -> Form {
        // Whom it is for: 0 is nobody.
        let note = self.destination.map_or(0, |to| to as u64 + 1);
        Form { function: 4, layout: 0, note }
    }

    fn bytes_for(&self, _at: &At, to: usize) -> usize {
        if self.destination == Some(to) { size_of_val(&*self.values) } else { 0 }
    }

    fn pack(&self, _at: &At, to: usize, body: &mut [u8]) {
        if self.destination == Some(to) {
            body.copy_from_slice(bytemuck::cast_slice(&self.values));
        }
    }

    fn is_for_all(&self, _at: &At) -> bool {
        false
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        let destinations: Vec<_> =
            (0..at.members()).map(|slot| self.destination_of(slot, at, parcels)).collect();
        sources_of(&destinations)?;
        let len = size_of_val(&*self.values);
        parcels.check(at, |from| if destinations[from] == Some(at.slot) { len } else { 0 })
    }

    fn unpack(self, at: &At, parcels: &Parcels) -> Turn<Self> {
        let is_giver = |slot: &usize| self.destination_of(*slot, at, parcels) == Some(at.slot);
        let giver = (0..at.members()).find(is_giver);
        Turn::Done(match giver {
            Some(giver) if giver == at.slot => self.values,
            Some(giver) => parcels.elements(giver).to_vec(),
            None => bytemuck::zeroed_vec(self.values.len()),
        })
    }
}

impl<T: Element> Handing<T> {
    /// To whom the member in `slot` hands its elements.
    fn destination_of(&self, slot: usize, at: &At, parcels: &Parcels) -> Option<usize> {
        if slot == at.slot {
            return self.destination;
        }
        let note = parcels.brought(slot)?.form.note;
        usize::try_from(note.checked_sub(1)?).ok().filter(|to| *to < at.members())
    }
}

/// Of a transfer: all, from the first member to the second. Of an all_reduce: to each member first its slice; then the combined slice
/// of this member to all.
impl<T: Element> Travels for Vec<T> {
    type Output = Self;

    fn form(&self) -> Form {
        Form { function: 5, ..Form::default() }
    }

    fn bytes_for(&self, at: &At, to: usize) -> usize {
        let count = match (at.descriptor.op, at.round) {
            (Op::AllReduce, 0) => balanced(self.len(), at.members(), to).len(),
            (Op::AllReduce, _) => balanced(self.len(), at.members(), at.slot).len(),
            // Who takes brings nothing.
            _ => self.len(),
        };
        count * size_of::<T>()
    }

    fn pack(&self, at: &At, to: usize, body: &mut [u8]) {
        let part = match (at.descriptor.op, at.round) {
            (Op::AllReduce, 0) => balanced(self.len(), at.members(), to),
            (Op::AllReduce, _) => balanced(self.len(), at.members(), at.slot),
            _ => 0..self.len(),
        };
        body.copy_from_slice(bytemuck::cast_slice(&self[part]));
    }

    fn is_for_all(&self, at: &At) -> bool {
        at.descriptor.op == Op::AllReduce && at.round > 0
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        let count = |from| match (at.descriptor.op, at.round) {
            (Op::AllReduce, 0) => balanced(self.len(), at.members(), at.slot).len(),
            (Op::AllReduce, _) => balanced(self.len(), at.members(), from).len(),
            (Op::Recv, _) => at.descriptor.counts.total(),
            _ => 0,
        };
        // The count of a receiver is its caller's, and no buffer of this rank has so many elements.
        parcels.check(at, |from| count(from).saturating_mul(size_of::<T>()))
    }

    fn unpack(mut self, at: &At, parcels: &Parcels) -> Turn<Self> {
        match (at.descriptor.op, at.round) {
            (Op::AllReduce, 0) => {
                let own = balanced(self.len(), at.members(), at.slot);
                let reduction = at.descriptor.reduction.expect("an all_reduce has one");
                reduce_in_place(reduction, &mut self[own], at, parcels);
                Turn::Again(self)
            }
            (Op::AllReduce, _) => {
                fill_slices(&mut self, at, parcels);
                Turn::Done(self)
            }
            (Op::Recv, _) => Turn::Done(parcels.elements(0).to_vec()),
            _ => Turn::Done(Self::new()),
        }
    }
}

/// Copies every other member's slice to its place.
pub(super) fn fill_slices<T: Element>(values: &mut [T], at: &At, parcels: &Parcels) {
    let len = values.len();
    for from in (0..at.members()).filter(|from| *from != at.slot) {
        values[balanced(len, at.members(), from)].copy_from_slice(parcels.elements(from));
    }
}
