//! The gradient of a product: for each member, the product of the others' elements.

use hsdp_comm::{Group, Tag};
use hsdp_sharding::DType;

use super::element::Differentiable;
use super::exchange::Exchange;
use crate::error::Error;

/// A member's input of a product.
#[derive(Debug)]
pub(super) struct Factors<T>(pub(super) Vec<T>);

impl<T: Differentiable> Factors<T> {
    /// Multiplies each cotangent by the product of the other members' elements.
    ///
    /// Each member gets all members' elements of its own range, makes the products that leave one
    /// out, and sends them back: two all_to_alls, and memory for one input, where an all_gather
    /// would need one for each member. A product that leaves one out is made of the elements before
    /// and after that one, never by a division.
    ///
    /// Products of 16-bit elements travel in f32, because a product of the other members' elements
    /// may overflow f16 even if the gradient does not.
    pub(super) fn multiply_by_others(
        &self,
        group: &Group,
        tag: Tag,
        cotangents: &mut [T],
    ) -> Result<(), Error> {
        match T::DTYPE {
            DType::F16 | DType::BF16 => self.multiply::<f32>(group, tag, cotangents),
            _ => self.multiply::<T>(group, tag, cotangents),
        }
    }

    /// Does the same with products that travel as `P`.
    fn multiply<P: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        cotangents: &mut [T],
    ) -> Result<(), Error> {
        let exchange = Exchange::new(group, self.0.len());
        let everybodys = exchange.to_owners(group, tag, &self.0)?;
        let others = exchange.to_members(group, tag, &others::<T, P>(&everybodys, group.size()))?;
        for (cotangent, others) in cotangents.iter_mut().zip(others) {
            *cotangent = T::from_f64(cotangent.to_f64() * others.to_f64());
        }
        Ok(())
    }
}

/// Returns, for each member, the products of the other members' elements. `everybodys` has one
/// range of each, in member order.
fn others<T: Differentiable, P: Differentiable>(everybodys: &[T], members: usize) -> Vec<P> {
    let len = everybodys.len() / members;
    let mut others = vec![P::from_f64(1.0); everybodys.len()];
    let (mut before, mut after) = (vec![1.0; members], vec![1.0; members]);
    for element in 0..len {
        let of = |member: usize| everybodys[member * len + element].to_f64();
        for member in 1..members {
            before[member] = before[member - 1] * of(member - 1);
            let back = members - 1 - member;
            after[back] = after[back + 1] * of(back + 1);
        }
        for member in 0..members {
            others[member * len + element] = P::from_f64(before[member] * after[member]);
        }
    }
    others
}
