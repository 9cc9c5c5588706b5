//! What travels of the operations that pass vectors on, and of all_reduce.

use hsdp_kernels::Element;
use hsdp_sharding::balanced;

use super::exchange::reduce_in_place;
use super::travels::{At, Parcels, Travels, Turn};
use crate::Op;
use crate::work::Handing;

/// Of a barrier: that a member is there.
impl Travels for () {
    type Output = ();

    fn bytes_for(&self, _at: &At, _to: usize) -> usize {
        0
    }

    fn pack(&self, _at: &At, _to: usize, _body: &mut [u8]) {}

    fn is_for_all(&self, _at: &At) -> bool {
        true
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        parcels.check(at, |_| 0)
    }

    fn unpack(self, _at: &At, _parcels: &Parcels) -> Turn<Self> {
        Turn::Done(())
    }
}

/// Of a permutation: what is handed over, to whom it is.
impl<T: Element> Travels for Handing<T> {
    type Output = Vec<T>;

    fn bytes_for(&self, _at: &At, to: usize) -> usize {
        // One element more than there are says that they are for this member, also where there are none.
        if self.destination == Some(to) { (self.values.len() + 1) * size_of::<T>() } else { 0 }
    }

    fn pack(&self, _at: &At, _to: usize, body: &mut [u8]) {
        if let Some(body) = body.get_mut(size_of::<T>()..) {
            body.copy_from_slice(bytemuck::cast_slice(&self.values));
        }
    }

    fn is_for_all(&self, _at: &At) -> bool {
        false
    }

    fn check(&self, at: &At, parcels: &Parcels) -> Result<(), String> {
        let expected = (self.values.len() + 1) * size_of::<T>();
        let len = |from: usize| parcels.bytes(from).len();
        parcels.check(at, |from| if len(from) == 0 { 0 } else { expected })?;
        let mut givers = self.givers(at, parcels);
        match (givers.next(), givers.next()) {
            (Some(one), Some(other)) => Err(format!(
                "members {one} and {other} both hand their elements to member {}",
                at.slot
            )),
            _ => Ok(()),
        }
    }

    fn unpack(self, at: &At, parcels: &Parcels) -> Turn<Self> {
        let giver = self.givers(at, parcels).next();
        Turn::Done(match giver {
            Some(giver) if giver == at.slot => self.values,
            Some(giver) => parcels.elements(giver)[1..].to_vec(),
            None => bytemuck::zeroed_vec(self.values.len()),
        })
    }
}

impl<T: Element> Handing<T> {
    /// Who hands something to this member.
    fn givers(&self, at: &At, parcels: &Parcels) -> impl Iterator<Item = usize> {
        let hands = |slot: &usize| match *slot == at.slot {
            true => self.destination == Some(at.slot),
            false => !parcels.bytes(*slot).is_empty(),
        };
        (0..at.members()).filter(hands)
    }
}

/// Of a transfer: all, from the first member to the second. Of an all_reduce: to each member first its slice; then the combined slice
/// of this member to all.
impl<T: Element> Travels for Vec<T> {
    type Output = Self;

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
        parcels.check(at, |from| count(from) * size_of::<T>())
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
