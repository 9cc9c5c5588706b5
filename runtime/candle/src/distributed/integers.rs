//! Collectives of integers, on a tape without gradients.

use candle_core::{Tensor, WithDType};
use hsdp::collective::{Collective, Reducer};
use hsdp::dist::{Applied, Call};
use hsdp_comm::{Group, Reduction, Tag};
use hsdp_kernels::Element;

use super::elements::{elements_of, tensor_of};
use super::{refuse, rows};
use crate::error::Error;

/// Applies a collective to integers, and records nothing. Refuses averages, factors and scans,
/// which are computed in floats.
pub(super) fn apply<T: Element + WithDType>(
    call: &Call<'_, Tensor>,
) -> Result<Applied<Tensor>, Error> {
    let shape = rows::output_shape(call)?;
    let collective = rows::in_elements(call.collective, call.input);
    let input = elements_of::<T>(call.input)?;
    let output = match &collective {
        Collective::AllReduce { .. }
        | Collective::ReduceScatter { .. }
        | Collective::Reduce { .. } => reduced(call, &collective, input)?,
        Collective::Permute { destinations } if destinations.len() != call.group.size() => {
            let (count, size) = (destinations.len(), call.group.size());
            return Err(refuse(call, format!("{count} destinations for {size} members")));
        }
        Collective::Scan => return Err(refuse(call, "integers are not scanned".to_owned())),
        Collective::Share
        | Collective::Slice { .. }
        | Collective::Place
        | Collective::OnlyFirst => Some(converted(&collective, call.group, input)?),
        _ => moved(&collective, (call.group, call.tag), input)?,
    };
    let output = output.zip(shape).map(|(output, shape)| tensor_of(output, shape));
    Ok(Applied { output: output.transpose()?, link: None })
}

fn reduced<T: Element>(
    call: &Call<'_, Tensor>,
    collective: &Collective,
    input: Vec<T>,
) -> Result<Option<Vec<T>>, Error> {
    let (group, tag) = (call.group, call.tag);
    let reduction = |reducer: &Reducer| match reducer {
        Reducer::Sum => Ok(Reduction::Sum),
        Reducer::Product => Ok(Reduction::Product),
        Reducer::Min => Ok(Reduction::Min),
        Reducer::Max => Ok(Reduction::Max),
        other => Err(refuse(call, format!("integers have no {other:?}"))),
    };
    Ok(match collective {
        Collective::AllReduce { reducer, .. } => {
            Some(group.all_reduce(tag, reduction(reducer)?, input).and_then(wait)?)
        }
        Collective::ReduceScatter { reducer } => {
            Some(group.reduce_scatter(tag, reduction(reducer)?, input).and_then(wait)?)
        }
        Collective::Reduce { root, reducer } => {
            group.reduce(tag, *root, reduction(reducer)?, input).and_then(wait)?
        }
        _ => unreachable!("the others reduce nothing"),
    })
}

fn moved<T: Element>(
    collective: &Collective,
    (group, tag): (&Group, Tag),
    input: Vec<T>,
) -> Result<Option<Vec<T>>, hsdp::Error> {
    let len = input.len();
    Ok(match collective {
        Collective::AllGather { .. } => Some(group.all_gather(tag, input).and_then(wait)?),
        Collective::Broadcast { root, .. } => {
            Some(group.broadcast(tag, *root, input).and_then(wait)?)
        }
        Collective::Gather { root } => group.gather(tag, *root, input).and_then(wait)?,
        Collective::Scatter { root } => {
            let values = (group.index() == *root).then_some(input);
            Some(group.scatter(tag, *root, values, len / group.size()).and_then(wait)?)
        }
        Collective::AllToAll { send, receive } => {
            Some(group.all_to_all(tag, input, send.clone(), receive.clone()).and_then(wait)?)
        }
        Collective::Permute { destinations } => {
            let to = destinations.get(group.index()).copied().flatten();
            Some(group.permute(tag, to, input).and_then(wait)?)
        }
        Collective::Receive { from } => Some(group.recv(tag, *from, len).and_then(wait)?),
        Collective::Send { to } => {
            // The send completes when the receiver takes it, and the receiver may have to send to
            // this rank first.
            drop(group.send(tag, *to, input)?);
            None
        }
        _ => unreachable!("the others reduce, or move nothing"),
    })
}

fn converted<T: Element + WithDType>(
    collective: &Collective,
    group: &Group,
    input: Vec<T>,
) -> Result<Vec<T>, hsdp::Error> {
    let (index, size, len) = (group.index(), group.size(), input.len());
    Ok(match collective {
        Collective::Slice { .. } => {
            input[index * (len / size)..(index + 1) * (len / size)].to_vec()
        }
        Collective::Place => {
            let mut whole = hsdp_kernels::zeros(len.saturating_mul(size))?;
            whole[index * len..(index + 1) * len].copy_from_slice(&input);
            whole
        }
        Collective::OnlyFirst if index != 0 => vec![T::zero(); len],
        _ => input,
    })
}

fn wait<O>(pending: hsdp_comm::Pending<O>) -> Result<O, hsdp_comm::Error> {
    pending.wait()
}
