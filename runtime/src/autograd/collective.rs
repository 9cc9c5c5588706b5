//! Collectives with their gradients, on buffers of one rank's elements.
//!
//! The gradient is that of **the sum of all ranks' losses**: the gradient that every rank gets when
//! each rank starts a backward from a loss of its own. Where all ranks hold the same loss, and it
//! counts once, the output is [`Copies::Invariant`]. PyTorch issue 58005 asks which of the two is
//! meant. `docs/gradients.md` answers the question, and the types of
//! [`dist`](crate::autograd::dist) make a program decide it.
//!
//! In the table `g` is the cotangent of the output, `W` the number of members, and sums are over
//! the members `k`:
//!
//! | collective | backward, of copies that are `Replicate` | of copies that are `Invariant` |
//! |---|---|---|
//! | all_reduce sum | sum of `g_k` | `g` |
//! | all_reduce avg | sum of `g_k`, over `W` | `g / W` |
//! | all_reduce premultiplied by `c` | `c` times the sum of `g_k` | `c g` |
//! | all_reduce product | sum of `g_k`, times the product of the others' elements | `g` times that product |
//! | all_reduce min, max | sum of `g_k`, shared evenly by the members that hold the extreme | `g`, shared likewise |
//! | all_gather | reduce_scatter sum | the own part of `g` |
//! | broadcast | reduce sum to the root | `g`, at the root |
//! | reduce_scatter | all_gather, then as all_reduce | |
//! | reduce | broadcast, then as all_reduce | |
//! | gather, scatter | scatter, gather | |
//! | all_to_all, permute, send | the same in the opposite direction | |
//! | scan | scan from the other end | |
//!
//! The formulas come from the discussion in PyTorch issue 58005 and from the adjoints of linear
//! maps. The backward of a product multiplies the other members' elements and never divides, so
//! zeros need no special case.

use std::ops::Range;

use hsdp_comm::{Group, Reduction, Stage, Tag};
use hsdp_kernels::{Element, zeros};

pub use super::operation::{Collective, Copies, Differentiable, Reducer};
use super::share::{ReductionShare, each, scan};
use crate::error::Error;

impl Collective {
    /// Applies the collective to `input`. Returns this member's output, or `None` where it has
    /// none, and the [`Backward`] that computes the gradient.
    ///
    /// **Collective** over the group, under `tag`, except `Share`, `Slice`, `Place` and
    /// `OnlyFirst`, which move nothing in the forward. Waits for completion, except for that of a
    /// `Send`.
    ///
    /// # Errors
    /// [`Error::Collective`] if the input, a count, a root, a factor or a list does not fit the
    /// group; nothing was issued then. [`Error::Comm`] if the communication fails;
    /// [`Error::Kernel`] if a `Place` finds no memory for its output.
    pub fn forward<T: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        mut input: Vec<T>,
    ) -> Result<(Option<Vec<T>>, Backward<T>), Error> {
        let len = input.len();
        self.check(group, len)?;
        let (output, share) = match self.reducer() {
            None if *self == Self::Scan => {
                (Some(scan(group, tag, input, 0..group.size())?), ReductionShare::Whole)
            }
            None | Some(Reducer::Sum) => (self.issue(group, tag, input)?, ReductionShare::Whole),
            Some(Reducer::Avg) => {
                (self.issue(group, tag, input)?, ReductionShare::Over(group.size()))
            }
            Some(Reducer::PreMultiplied(factor)) => {
                each(&mut input, |value| value * factor);
                (self.issue(group, tag, input)?, ReductionShare::Times(factor))
            }
            Some(Reducer::Product) => {
                (self.issue(group, tag, input.clone())?, ReductionShare::Others(input))
            }
            // A member that holds an extreme must see it, whichever member's part it is in.
            Some(reducer @ (Reducer::Min | Reducer::Max)) => {
                let whole = group.all_reduce(tag, reducer.reduction(), input.clone())?.wait()?;
                let share = ReductionShare::of_extremes(&input, &whole);
                let output = match self {
                    Self::ReduceScatter { .. } => Some(own_part(group, &whole)),
                    Self::Reduce { root, .. } => (group.index() == *root).then_some(whole),
                    _ => Some(whole),
                };
                (output, share)
            }
        };
        let tag = Tag { stage: Stage::Backward, ..tag };
        Ok((output, Backward { group: group.clone(), tag, collective: self.clone(), len, share }))
    }

    /// Applies the collective to integers, which have no gradient. Returns this member's output, or
    /// `None` where it has none. Averages, factors and scans are refused: they are computed in
    /// floats.
    ///
    /// **Collective** as [`forward`](Self::forward) is.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`Error::Collective`] for what integers do not have.
    pub fn apply<T: Element>(
        &self,
        group: &Group,
        tag: Tag,
        input: Vec<T>,
    ) -> Result<Option<Vec<T>>, Error> {
        self.check(group, input.len())?;
        match self.reducer() {
            Some(reducer @ (Reducer::Avg | Reducer::PreMultiplied(_))) => {
                Err(self.refuse(group, format!("integers have no {reducer:?}")))
            }
            _ => self.issue(group, tag, input),
        }
    }

    /// Issues the collective for elements as they are, without factors, and waits.
    fn issue<T: Element>(
        &self,
        group: &Group,
        tag: Tag,
        input: Vec<T>,
    ) -> Result<Option<Vec<T>>, Error> {
        let len = input.len();
        Ok(Some(match self {
            Self::AllReduce { reducer, .. } => {
                group.all_reduce(tag, reducer.reduction(), input)?.wait()?
            }
            Self::ReduceScatter { reducer } => {
                group.reduce_scatter(tag, reducer.reduction(), input)?.wait()?
            }
            Self::Reduce { root, reducer } => {
                return Ok(group.reduce(tag, *root, reducer.reduction(), input)?.wait()?);
            }
            Self::AllGather { .. } => group.all_gather(tag, input)?.wait()?,
            Self::Broadcast { root, .. } => group.broadcast(tag, *root, input)?.wait()?,
            Self::Gather { root } => return Ok(group.gather(tag, *root, input)?.wait()?),
            Self::Scatter { root } => {
                let values = (group.index() == *root).then_some(input);
                group.scatter(tag, *root, values, len / group.size())?.wait()?
            }
            Self::AllToAll { send, receive } => {
                group.all_to_all(tag, input, send.clone(), receive.clone())?.wait()?
            }
            Self::Permute { destinations } => {
                group.permute(tag, destinations[group.index()], input)?.wait()?
            }
            Self::Send { to } => {
                // The send completes when the other member receives, and that member may have to
                // send to this one first.
                drop(group.send(tag, *to, input)?);
                return Ok(None);
            }
            Self::Receive { from } => group.recv(tag, *from, len)?.wait()?,
            Self::Scan => return Err(self.refuse(group, "integers are not scanned".to_owned())),
            Self::Share => input,
            Self::Slice { .. } => own_part(group, &input),
            Self::Place => placed(group, &input)?,
            Self::OnlyFirst => only_first(group, input),
        }))
    }
}

/// The backward of one [`Collective`]: the adjoint of its forward.
#[derive(Debug)]
#[must_use = "the members of the group wait for each other's backwards"]
pub struct Backward<T> {
    group: Group,
    tag: Tag,
    collective: Collective,
    /// Elements of this member's input.
    len: usize,
    share: ReductionShare<T>,
}

impl<T: Differentiable> Backward<T> {
    /// Returns the gradient of the input, with as many elements as the input, from the cotangent of
    /// this member's output. The cotangent is `None` where this member has no output, and zeros
    /// where its loss does not depend on the output.
    ///
    /// **Collective** over the group of the forward, in the same order on all members. A member
    /// whose loss does not depend on the output takes part too. May be called again for another
    /// cotangent.
    ///
    /// # Errors
    /// [`Error::Collective`] if the cotangent does not have as many elements as the output; nothing
    /// is issued then. [`Error::Comm`] if the communication fails; [`Error::Kernel`] if there is
    /// not enough memory.
    pub fn gradient(&self, cotangent: Option<Vec<T>>) -> Result<Vec<T>, Error> {
        self.check(cotangent.as_deref())?;
        let cotangent = cotangent.unwrap_or_default();
        let Self { group, tag, len, share, .. } = self;
        let tag = *tag;
        let is_at = |root: usize| group.index() == root;
        let mut gradient = match &self.collective {
            // One operation, as in the forward: f16 may hold an average whose sum it cannot hold.
            Collective::AllReduce { reducer: Reducer::Avg, output: Copies::Replicate } => {
                return Ok(group.all_reduce(tag, Reduction::Avg, cotangent)?.wait()?);
            }
            Collective::AllReduce { output: Copies::Replicate, .. } | Collective::Share => {
                group.all_reduce(tag, Reduction::Sum, cotangent)?.wait()?
            }
            Collective::AllReduce { output: Copies::Invariant, .. } => cotangent,
            Collective::ReduceScatter { .. } | Collective::Slice { input: Copies::Invariant } => {
                group.all_gather(tag, cotangent)?.wait()?
            }
            Collective::Reduce { root, .. } => {
                let mine = if is_at(*root) { cotangent } else { zeros(*len)? };
                group.broadcast(tag, *root, mine)?.wait()?
            }
            Collective::AllGather { output: Copies::Replicate } => {
                group.reduce_scatter(tag, Reduction::Sum, cotangent)?.wait()?
            }
            Collective::AllGather { output: Copies::Invariant } | Collective::Place => {
                own_part(group, &cotangent)
            }
            Collective::Broadcast { root, output: Copies::Replicate } => {
                let summed = group.reduce(tag, *root, Reduction::Sum, cotangent)?.wait()?;
                summed.map_or_else(|| zeros(*len), Ok)?
            }
            Collective::Broadcast { root, output: Copies::Invariant } => {
                if is_at(*root) {
                    cotangent
                } else {
                    zeros(*len)?
                }
            }
            Collective::Gather { root } => {
                let parts = is_at(*root).then_some(cotangent);
                group.scatter(tag, *root, parts, *len)?.wait()?
            }
            Collective::Scatter { root } => {
                let parts = group.gather(tag, *root, cotangent)?.wait()?;
                parts.map_or_else(|| zeros(*len), Ok)?
            }
            Collective::AllToAll { send, receive } => {
                group.all_to_all(tag, cotangent, receive.clone(), send.clone())?.wait()?
            }
            Collective::Permute { destinations } => {
                let source = destinations.iter().position(|to| *to == Some(group.index()));
                group.permute(tag, source, cotangent)?.wait()?
            }
            Collective::Send { to } => group.recv(tag, *to, *len)?.wait()?,
            Collective::Receive { from } => {
                drop(group.send(tag, *from, cotangent)?);
                zeros(*len)?
            }
            Collective::Scan => scan(group, tag, cotangent, (0..group.size()).rev())?,
            Collective::Slice { input: Copies::Replicate } => placed(group, &cotangent)?,
            Collective::OnlyFirst => only_first(group, cotangent),
        };
        share.apply(group, tag, &mut gradient)?;
        Ok(gradient)
    }

    /// Checks that `cotangent` has the length of this member's output.
    fn check(&self, cotangent: Option<&[T]>) -> Result<(), Error> {
        let output = self.collective.output_len(&self.group, self.len);
        let what = match (cotangent.map(<[T]>::len), output) {
            (got, want) if got == want => return Ok(()),
            (Some(got), Some(want)) => {
                format!("the cotangent has {got} elements, the output has {want}")
            }
            (Some(got), None) => {
                format!("there is a cotangent of {got} elements, but no output on this rank")
            }
            (None, want) => {
                format!("there is no cotangent of the output of {} elements", want.unwrap_or(0))
            }
        };
        Err(self.collective.refuse(&self.group, what))
    }
}

/// Returns this member's elements of a whole.
fn own_part<T: Element>(group: &Group, whole: &[T]) -> Vec<T> {
    whole[own_range(group, whole.len() / group.size())].to_vec()
}

/// Returns a whole that is zero except for this member's part.
///
/// # Errors
/// If there is no memory for the whole.
fn placed<T: Element>(group: &Group, part: &[T]) -> Result<Vec<T>, Error> {
    let mut whole = zeros(part.len().saturating_mul(group.size()))?;
    whole[own_range(group, part.len())].copy_from_slice(part);
    Ok(whole)
}

fn own_range(group: &Group, len: usize) -> Range<usize> {
    group.index() * len..(group.index() + 1) * len
}

/// Returns the values on the first member, zeros on the others.
fn only_first<T: Element>(group: &Group, mut values: Vec<T>) -> Vec<T> {
    if group.index() != 0 {
        values.fill(T::zeroed());
    }
    values
}
