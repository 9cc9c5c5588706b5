//! Collectives of rows: their counts in elements, and the shapes of their outputs.

use candle_core::{Shape, Tensor};
use hsdp::collective::Collective;
use hsdp::dist::Call;

use super::refuse;
use crate::error::Error;

/// Converts the counts of a collective from rows of `input` to elements.
pub(super) fn in_elements(collective: &Collective, input: &Tensor) -> Collective {
    let len = row_len(input);
    match collective {
        Collective::AllToAll { send, receive } => {
            let elements = |rows: &usize| rows.saturating_mul(len);
            let [send, receive] = [send, receive].map(|rows| rows.iter().map(elements).collect());
            Collective::AllToAll { send, receive }
        }
        other => other.clone(),
    }
}

/// Returns the number of elements in a row, or `usize::MAX` if it overflows, as in a tensor without
/// rows.
fn row_len(input: &Tensor) -> usize {
    input.dims().iter().skip(1).fold(1, |len: usize, dim| len.saturating_mul(*dim))
}

/// Returns the shape of this rank's output, if it has one. Refuses inputs that cannot be split into
/// the rows that the call needs.
pub(super) fn output_shape(call: &Call<'_, Tensor>) -> Result<Option<Shape>, Error> {
    let is_at = |root: usize| call.group.index() == root;
    Ok(match call.collective {
        Collective::AllReduce { .. }
        | Collective::Broadcast { .. }
        | Collective::Permute { .. }
        | Collective::Receive { .. }
        | Collective::Scan
        | Collective::Share
        | Collective::OnlyFirst => Some(call.input.shape().clone()),
        Collective::Reduce { root, .. } => is_at(*root).then(|| call.input.shape().clone()),
        Collective::AllGather { .. } | Collective::Place => {
            Some(with_rows(call, rows_of_all(call)?))
        }
        Collective::Gather { root } => {
            let all = with_rows(call, rows_of_all(call)?);
            is_at(*root).then_some(all)
        }
        Collective::ReduceScatter { .. }
        | Collective::Scatter { .. }
        | Collective::Slice { .. } => Some(with_rows(call, own_rows(call)?)),
        Collective::AllToAll { send, receive } => {
            check_sent(call, send)?;
            Some(with_rows(call, received(call, receive)?))
        }
        Collective::Send { .. } => None,
        _ => return Err(refuse(call, "it is not implemented for candle's tensors".to_owned())),
    })
}

fn rows(call: &Call<'_, Tensor>) -> Result<usize, Error> {
    let scalar = || refuse(call, "a scalar has no rows: reshape it to [1]".to_owned());
    call.input.dims().first().copied().ok_or_else(scalar)
}

/// Returns the number of rows of all members together. Refuses rows without elements whose number
/// overflows `usize`.
fn rows_of_all(call: &Call<'_, Tensor>) -> Result<usize, Error> {
    let (rows, size) = (rows(call)?, call.group.size());
    let what = || format!("the input has {rows} rows, and those of {size} members overflow");
    rows.checked_mul(size).ok_or_else(|| refuse(call, what()))
}

fn own_rows(call: &Call<'_, Tensor>) -> Result<usize, Error> {
    let (rows, size) = (rows(call)?, call.group.size());
    if rows.is_multiple_of(size) {
        return Ok(rows / size);
    }
    let what = format!("the input has {rows} rows, {size} members need a multiple of {size}");
    Err(refuse(call, what))
}

fn check_sent(call: &Call<'_, Tensor>, send: &[usize]) -> Result<(), Error> {
    let rows = rows(call)?;
    if sum(send) == Some(rows) {
        return Ok(());
    }
    Err(refuse(call, format!("the input has {rows} rows, the counts to send are {send:?}")))
}

/// Returns the number of rows that this rank receives. Refuses counts whose elements overflow
/// `usize`.
fn received(call: &Call<'_, Tensor>, receive: &[usize]) -> Result<usize, Error> {
    let len = row_len(call.input);
    let rows = sum(receive).filter(|rows| rows.checked_mul(len).is_some());
    let what =
        || format!("the counts to receive are {receive:?}, of {len} elements each, which overflow");
    rows.ok_or_else(|| refuse(call, what()))
}

fn sum(counts: &[usize]) -> Option<usize> {
    counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count))
}

fn with_rows(call: &Call<'_, Tensor>, rows: usize) -> Shape {
    let mut dims = call.input.dims().to_vec();
    if let Some(first) = dims.first_mut() {
        *first = rows;
    }
    dims.into()
}
