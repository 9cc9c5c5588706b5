//! How a cotangent of a collective's output becomes a cotangent of its input.

use hsdp_comm::{Group, Reduction, Stage, Tag};
use hsdp_kernels::zeros;

use super::conversion::{only_first, own_part, placed};
use super::element::Differentiable;
use super::operation::Copies;
use super::scan::{self, Direction};
use super::share::{Share, Slope};
use crate::error::Error;

/// The backward of one [`Collective`](super::Collective): the adjoint of its forward.
#[derive(Debug)]
#[must_use = "the members of the group wait for each other's backwards"]
pub struct Backward<T> {
    group: Group,
    tag: Tag,
    name: &'static str,
    /// Elements of this member's input.
    len: usize,
    way: Way<T>,
}

/// The backward of each collective, with the values that it needs from the forward.
#[derive(Debug)]
pub(super) enum Way<T> {
    AllReduce { share: Share<T>, output: Copies },
    ReduceScatter { share: Share<T> },
    Reduce { root: usize, share: Share<T> },
    AllGather(Copies),
    Broadcast { root: usize, output: Copies },
    Gather { root: usize },
    Scatter { root: usize },
    AllToAll { send: Vec<usize>, receive: Vec<usize> },
    Permute { back_to: Option<usize> },
    Send { to: usize },
    Receive { from: usize },
    Scan,
    Share,
    Slice(Copies),
    Place,
    OnlyFirst,
}

impl<T: Differentiable> Backward<T> {
    pub(super) fn new(
        group: &Group,
        tag: Tag,
        (name, len): (&'static str, usize),
        way: Way<T>,
    ) -> Self {
        let tag = Tag { stage: Stage::Backward, ..tag };
        Self { group: group.clone(), tag, name, len, way }
    }

    /// The gradient of the input, with as many elements as the input, from the cotangent of this member's output. The
    /// cotangent is `None` where this member has no output, and zeros where its loss does not depend on the output.
    ///
    /// **Collective** over the group of the forward, in the same order on all members. A member whose loss does not
    /// depend on the output takes part too. May be called again for another cotangent.
    ///
    /// # Errors
    /// [`Error::Collective`] if the cotangent does not have as many elements as the output; nothing is issued then.
    /// [`Error::Comm`] if the communication fails; [`Error::Kernel`] if there is not enough memory.
    pub fn gradient(&self, cotangent: Option<Vec<T>>) -> Result<Vec<T>, Error> {
        self.check(cotangent.as_deref())?;
        let cotangent = cotangent.unwrap_or_default();
        match &self.way {
            Way::AllReduce { .. } | Way::ReduceScatter { .. } | Way::Reduce { .. } => {
                self.reduced(cotangent)
            }
            Way::Share | Way::Slice(_) | Way::Place | Way::OnlyFirst => self.converted(cotangent),
            _ => self.passed_back(cotangent),
        }
    }

    /// Checks that `cotangent` has the length of this member's output.
    fn check(&self, cotangent: Option<&[T]>) -> Result<(), Error> {
        let what = match (cotangent.map(<[T]>::len), self.output_len()) {
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
        Err(Error::Collective { operation: self.name, rank: self.group.rank(), what })
    }

    /// The number of elements of the forward's output on this member; `None` where it had no output.
    fn output_len(&self) -> Option<usize> {
        let (size, index, len) = (self.group.size(), self.group.index(), self.len);
        match &self.way {
            Way::Reduce { root, .. } => (index == *root).then_some(len),
            Way::Gather { root } => (index == *root).then_some(len * size),
            Way::Send { .. } => None,
            Way::AllGather(_) | Way::Place => Some(len * size),
            Way::ReduceScatter { .. } | Way::Scatter { .. } | Way::Slice(_) => Some(len / size),
            Way::AllToAll { send, .. } => Some(send.iter().sum()),
            _ => Some(len),
        }
    }

    /// For reductions: makes the cotangent of the whole output, then takes this member's share of it.
    fn reduced(&self, cotangent: Vec<T>) -> Result<Vec<T>, Error> {
        let (group, tag) = (&self.group, self.tag);
        let (whole, share) = match &self.way {
            // One operation, as in the forward: f16 may hold an average whose sum it cannot hold.
            Way::AllReduce { share: Share::Linear(Slope::Over(_)), output: Copies::Replicate } => {
                return Ok(group.all_reduce(tag, Reduction::Avg, cotangent)?.wait()?);
            }
            Way::AllReduce { share, output: Copies::Replicate } => {
                (group.all_reduce(tag, Reduction::Sum, cotangent)?.wait()?, share)
            }
            Way::AllReduce { share, output: Copies::Invariant } => (cotangent, share),
            Way::ReduceScatter { share } => (group.all_gather(tag, cotangent)?.wait()?, share),
            Way::Reduce { root, share } => {
                let mine = if group.index() == *root { cotangent } else { zeros(self.len)? };
                (group.broadcast(tag, *root, mine)?.wait()?, share)
            }
            _ => unreachable!("the others reduce nothing"),
        };
        share.of_cotangent(group, tag, whole)
    }

    fn passed_back(&self, cotangent: Vec<T>) -> Result<Vec<T>, Error> {
        let (group, tag) = (&self.group, self.tag);
        let at = |root: usize| group.index() == root;
        Ok(match &self.way {
            Way::AllGather(Copies::Replicate) => {
                group.reduce_scatter(tag, Reduction::Sum, cotangent)?.wait()?
            }
            Way::AllGather(Copies::Invariant) => own_part(group, &cotangent),
            Way::Broadcast { root, output: Copies::Replicate } => {
                let summed = group.reduce(tag, *root, Reduction::Sum, cotangent)?.wait()?;
                summed.map_or_else(|| zeros(self.len), Ok)?
            }
            Way::Broadcast { root, output: Copies::Invariant } => {
                if at(*root) {
                    cotangent
                } else {
                    zeros(self.len)?
                }
            }
            Way::Gather { root } => {
                let parts = at(*root).then_some(cotangent);
                group.scatter(tag, *root, parts, self.len)?.wait()?
            }
            Way::Scatter { root } => {
                let parts = group.gather(tag, *root, cotangent)?.wait()?;
                parts.map_or_else(|| zeros(self.len), Ok)?
            }
            Way::AllToAll { send, receive } => {
                group.all_to_all(tag, cotangent, send.clone(), receive.clone())?.wait()?
            }
            Way::Permute { back_to } => group.permute(tag, *back_to, cotangent)?.wait()?,
            Way::Send { to } => group.recv(tag, *to, self.len)?.wait()?,
            Way::Receive { from } => {
                drop(group.send(tag, *from, cotangent)?);
                zeros(self.len)?
            }
            Way::Scan => scan::sums(group, tag, &cotangent, Direction::From)?,
            _ => unreachable!("the others reduce, or move nothing"),
        })
    }

    fn converted(&self, cotangent: Vec<T>) -> Result<Vec<T>, Error> {
        let (group, tag) = (&self.group, self.tag);
        Ok(match &self.way {
            Way::Share => group.all_reduce(tag, Reduction::Sum, cotangent)?.wait()?,
            Way::Slice(Copies::Replicate) => placed(group, &cotangent)?,
            Way::Slice(Copies::Invariant) => group.all_gather(tag, cotangent)?.wait()?,
            Way::Place => own_part(group, &cotangent),
            Way::OnlyFirst => only_first(group, cotangent),
            _ => unreachable!("the others move something"),
        })
    }
}
