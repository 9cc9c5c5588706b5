//! The forward of each collective, and the data for its backward.

use hsdp_comm::{Group, Tag};

use super::backward::{Backward, Way};
use super::conversion::{only_first, own_part, placed, source_of};
use super::element::Differentiable;
use super::operation::{Collective, Reducer};
use super::scan::{self, Direction};
use super::share::Share;
use crate::error::Error;

/// This member's output, where it has one, and the data for the backward.
type Forward<T> = Result<(Option<Vec<T>>, Way<T>), Error>;

impl Collective {
    /// Applies the collective to `input`. Returns this member's output, or `None` where it has none, and the [`Backward`] that
    /// computes the gradient.
    ///
    /// **Collective** over the group, under `tag`, except `Share`, `Slice`, `Place` and `OnlyFirst`, which move nothing in the
    /// forward. Waits for completion, except for that of a `Send`.
    ///
    /// # Errors
    /// [`Error::Collective`] if the input, a count, a root, a factor or a list does not fit the group; nothing was issued then.
    /// [`Error::Comm`] if the communication fails; [`Error::Kernel`] if a `Place` finds no memory for its output.
    pub fn forward<T: Differentiable>(
        &self,
        group: &Group,
        tag: Tag,
        input: Vec<T>,
    ) -> Result<(Option<Vec<T>>, Backward<T>), Error> {
        self.check(group, input.len())?;
        let len = input.len();
        let (output, way) = match self {
            Self::AllReduce { .. } | Self::ReduceScatter { .. } | Self::Reduce { .. } => {
                reduce(self, group, tag, input)?
            }
            Self::Share | Self::Slice { .. } | Self::Place | Self::OnlyFirst => {
                convert(self, group, input)?
            }
            _ => pass_on(self, group, tag, input)?,
        };
        Ok((output, Backward::new(group, tag, (self.name(), len), way)))
    }
}

fn reduce<T: Differentiable>(
    collective: &Collective,
    group: &Group,
    tag: Tag,
    input: Vec<T>,
) -> Forward<T> {
    let members = group.size();
    match *collective {
        Collective::AllReduce { reducer, output } => {
            let (reduced, share) = Share::of(reducer, members, input, |reduction, input| {
                Ok(Some(group.all_reduce(tag, reduction, input)?.wait()?))
            })?;
            Ok((reduced, Way::AllReduce { share, output }))
        }
        // A member that holds an extreme must see it, whichever member's part it is in.
        Collective::ReduceScatter { reducer: reducer @ (Reducer::Min | Reducer::Max) } => {
            let (reduced, share) = Share::of(reducer, members, input, |reduction, input| {
                Ok(Some(group.all_reduce(tag, reduction, input)?.wait()?))
            })?;
            Ok((reduced.map(|whole| own_part(group, &whole)), Way::ReduceScatter { share }))
        }
        Collective::ReduceScatter { reducer } => {
            let (reduced, share) = Share::of(reducer, members, input, |reduction, input| {
                Ok(Some(group.reduce_scatter(tag, reduction, input)?.wait()?))
            })?;
            Ok((reduced, Way::ReduceScatter { share }))
        }
        Collective::Reduce { root, reducer: reducer @ (Reducer::Min | Reducer::Max) } => {
            let (reduced, share) = Share::of(reducer, members, input, |reduction, input| {
                Ok(Some(group.all_reduce(tag, reduction, input)?.wait()?))
            })?;
            let output = reduced.filter(|_| group.index() == root);
            Ok((output, Way::Reduce { root, share }))
        }
        Collective::Reduce { root, reducer } => {
            let (reduced, share) = Share::of(reducer, members, input, |reduction, input| {
                Ok(group.reduce(tag, root, reduction, input)?.wait()?)
            })?;
            Ok((reduced, Way::Reduce { root, share }))
        }
        _ => unreachable!("the others reduce nothing"),
    }
}

/// Applies a collective that moves elements as they are, or sums them in order.
fn pass_on<T: Differentiable>(
    collective: &Collective,
    group: &Group,
    tag: Tag,
    input: Vec<T>,
) -> Forward<T> {
    let len = input.len();
    Ok(match collective {
        Collective::AllGather { output } => {
            (Some(group.all_gather(tag, input)?.wait()?), Way::AllGather(*output))
        }
        Collective::Broadcast { root, output } => {
            let copy = group.broadcast(tag, *root, input)?.wait()?;
            (Some(copy), Way::Broadcast { root: *root, output: *output })
        }
        Collective::Gather { root } => {
            (group.gather(tag, *root, input)?.wait()?, Way::Gather { root: *root })
        }
        Collective::Scatter { root } => {
            let values = (group.index() == *root).then_some(input);
            let part = group.scatter(tag, *root, values, len / group.size())?.wait()?;
            (Some(part), Way::Scatter { root: *root })
        }
        Collective::AllToAll { send, receive } => {
            let parts = group.all_to_all(tag, input, send.clone(), receive.clone())?.wait()?;
            let (send, receive) = (receive.clone(), send.clone());
            (Some(parts), Way::AllToAll { send, receive })
        }
        Collective::Permute { destinations } => {
            let member = group.index();
            let handed = group.permute(tag, destinations[member], input)?.wait()?;
            (Some(handed), Way::Permute { back_to: source_of(destinations, member) })
        }
        Collective::Send { to } => {
            // The send completes when the other member receives, and that member may have to send to this one first.
            drop(group.send(tag, *to, input)?);
            (None, Way::Send { to: *to })
        }
        Collective::Receive { from } => {
            (Some(group.recv(tag, *from, len)?.wait()?), Way::Receive { from: *from })
        }
        Collective::Scan => (Some(scan::sums(group, tag, &input, Direction::UpTo)?), Way::Scan),
        _ => unreachable!("the others reduce, or move nothing"),
    })
}

fn convert<T: Differentiable>(collective: &Collective, group: &Group, input: Vec<T>) -> Forward<T> {
    let (output, way) = match collective {
        Collective::Share => (input, Way::Share),
        Collective::Slice { input: copies } => (own_part(group, &input), Way::Slice(*copies)),
        Collective::Place => (placed(group, &input)?, Way::Place),
        Collective::OnlyFirst => (only_first(group, input), Way::OnlyFirst),
        _ => unreachable!("the others move something"),
    };
    Ok((Some(output), way))
}
