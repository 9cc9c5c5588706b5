//! candle as an autograd that records collectives: the ops that represent them in candle's graph,
//! and their rows.

use std::sync::{Arc, OnceLock};

use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CustomOp2, DType, Device, Layout, Result as CandleResult, Shape, Tensor, TensorId,
    WithDType, bail,
};
use half::{bf16, f16};
use hsdp::collective::{Backward, Collective, Differentiable};
use hsdp::dist::{Applied, Carrier, CarrierCall, Recording};
use hsdp::{Rank, Tag};
use hsdp_kernels::Element;
use parking_lot::Mutex;

use crate::error::Error;
use crate::storage::copy;
use crate::variables::VariablePurpose;
use crate::zeros;

/// candle's autograd: `Tape<Candle>` carries its tensors.
///
/// Tensors must be on the CPU, with the dtype f64, f32, f16 or bf16; on a tape without gradients
/// also i32, i64 or u32. Tensors that are not contiguous are copied. A gradient belongs to one
/// backward, and exists for variables only: candle does not differentiate gradients, and keeps none
/// of intermediate tensors.
#[derive(Clone, Copy, Debug)]
pub struct Candle;

impl Carrier for Candle {
    type Tensor = Tensor;
    type Error = Error;
    type Gradients = GradStore;

    fn apply(call: &CarrierCall<'_, Tensor>) -> Result<Applied<Tensor>, Error> {
        if !matches!(call.input.device(), Device::Cpu) {
            let what = format!("the input is on {:?}, not on the CPU", call.input.device());
            return Err(refuse(call, what));
        }
        match (call.input.dtype(), call.record) {
            (DType::F64, _) => real::<f64>(call),
            (DType::F32, _) => real::<f32>(call),
            (DType::F16, _) => real::<f16>(call),
            (DType::BF16, _) => real::<bf16>(call),
            (DType::I64, Recording::Nothing) => integers::<i64>(call),
            (DType::I32, Recording::Nothing) => integers::<i32>(call),
            (DType::U32, Recording::Nothing) => integers::<u32>(call),
            (dtype, Recording::Gradients) => {
                let hint = "use f64, f32, f16 or bf16, or for integers a tape without gradients";
                Err(refuse(call, format!("dtype {} has no gradient: {hint}", dtype.as_str())))
            }
            (dtype, Recording::Nothing) => {
                let known = "f64, f32, f16, bf16, i64, i32 and u32";
                Err(refuse(call, format!("dtype {} is not one of {known}", dtype.as_str())))
            }
        }
    }

    fn alias(tensor: &Tensor) -> Result<Tensor, Error> {
        Ok(tensor.broadcast_as(tensor.shape())?)
    }

    fn backward(loss: &Tensor, last: Option<&Tensor>) -> Result<GradStore, Error> {
        if loss.elem_count() != 1 || loss.dtype().is_int() {
            let shape = loss.shape();
            let dtype = loss.dtype().as_str();
            let what = format!("a loss must be one float, this one is {shape:?} of {dtype}");
            return Err(candle_core::Error::Msg(what).into());
        }
        let tied = last.map_or_else(|| Ok(loss.clone()), |last| loss.apply_op2(last, Tie));
        Ok(tied?.backward()?)
    }

    fn gradient(gradients: &GradStore, tensor: &Tensor) -> Option<Tensor> {
        // candle computes a gradient from tensors of the forward, and it would keep the whole
        // graph.
        gradients.get(tensor).map(Tensor::detach)
    }
}

fn real<T: Differentiable + WithDType>(
    call: &CarrierCall<'_, Tensor>,
) -> Result<Applied<Tensor>, Error> {
    let shape = output_shape(call)?;
    let collective = in_elements(call.collective, call.input);
    let input = elements_of::<T>(call.input)?;
    let (output, backward) = collective.forward(call.group, Tag::default(), input)?;
    let output = output.zip(shape);
    if call.record == Recording::Nothing {
        return unrecorded(output);
    }
    let after = call.after.map_or_else(first_link, |after| Ok(after.clone()))?;
    let op = CollectiveOp::new(call, backward, output);
    let view = op.view.clone();
    let link = call.input.apply_op2(&after, op)?;
    let view_of_link = |view: Arc<OnceLock<TensorId>>| {
        // The link is a parent of the next collective, so it does not show whether the output is
        // used.
        let output = Candle::alias(&link)?;
        let _ = view.set(output.id());
        Ok::<_, Error>(output)
    };
    let output = view.map(view_of_link).transpose()?;
    Ok(Applied { output, link: Some(link) })
}

fn integers<T: Element + WithDType>(
    call: &CarrierCall<'_, Tensor>,
) -> Result<Applied<Tensor>, Error> {
    let shape = output_shape(call)?;
    let collective = in_elements(call.collective, call.input);
    let output = collective.apply(call.group, Tag::default(), elements_of::<T>(call.input)?)?;
    unrecorded(output.zip(shape))
}

fn unrecorded<T: WithDType>(output: Option<(Vec<T>, Shape)>) -> Result<Applied<Tensor>, Error> {
    let output = output.map(|(output, shape)| tensor_of(output, shape)).transpose()?;
    Ok(Applied { output, link: None })
}

/// Returns the start of the chain of collectives. candle's backward skips tensors that depend on no
/// variable, and these may differ from rank to rank. With this variable, every collective depends
/// on one, on all ranks.
fn first_link() -> Result<Tensor, Error> {
    Ok(VariablePurpose::Collectives.variable(&Device::Cpu)?.into_inner())
}

/// Returns the elements of a tensor in row-major order, for any layout.
fn elements_of<T: WithDType>(tensor: &Tensor) -> CandleResult<Vec<T>> {
    tensor.detach().flatten_all()?.to_vec1()
}

/// Makes a tensor of these elements, a leaf of candle's graph.
fn tensor_of<T: WithDType>(elements: Vec<T>, shape: Shape) -> CandleResult<Tensor> {
    Tensor::from_vec(elements, shape, &Device::Cpu)
}

/// An applied collective with two parents: its input, and the link of the collective before it.
///
/// The second parent carries no value. It sets the order: candle runs the backward of an op before
/// the backwards of its parents, so the later one of two collectives runs its backward first, on
/// all ranks.
struct CollectiveOp<T> {
    name: &'static str,
    rank: Rank,
    backward: Backward<T>,
    /// Output until the op has run: without one on this rank, a scalar with an unused cotangent.
    output: Mutex<Option<(Vec<T>, Shape)>>,
    /// View of the output that the program has, if this rank has an output.
    view: Option<Arc<OnceLock<TensorId>>>,
}

impl<T: Differentiable + WithDType> CollectiveOp<T> {
    fn new(
        call: &CarrierCall<'_, Tensor>,
        backward: Backward<T>,
        output: Option<(Vec<T>, Shape)>,
    ) -> Self {
        let view = output.is_some().then(Arc::default);
        let output = output.unwrap_or_else(|| (vec![T::zero()], ().into()));
        Self {
            name: call.collective.name(),
            rank: call.group.rank(),
            backward,
            output: Mutex::new(Some(output)),
            view,
        }
    }

    fn differentiated_twice(&self) -> hsdp::Error {
        let what = "its gradient is to be differentiated, which candle cannot do for collectives: \
                    run one backward, with CANDLE_GRAD_DO_NOT_DETACH unset";
        hsdp::Error::Collective { operation: self.name, rank: self.rank, what: what.to_owned() }
    }
}

impl<T: Differentiable + WithDType> CustomOp2 for CollectiveOp<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> CandleResult<(CpuStorage, Shape)> {
        let Some((output, shape)) = self.output.lock().take() else {
            bail!("{} runs once", self.name)
        };
        Ok((T::to_cpu_storage_owned(output), shape))
    }

    /// Runs the backward, even if neither parent needs its gradient. Returns the gradients of both.
    fn bwd(
        &self,
        input: &Tensor,
        link: &Tensor,
        output: &Tensor,
        cotangent: &Tensor,
    ) -> CandleResult<(Option<Tensor>, Option<Tensor>)> {
        let cotangent = self.view.as_ref().map(|_| cotangent);
        if cotangent.is_some_and(Tensor::track_op) {
            return Err(Error::from(self.differentiated_twice()).into());
        }
        let cotangent = cotangent.map(elements_of).transpose()?;
        let gradient = self.backward.gradient(cotangent).map_err(Error::from)?;
        let wanted = input.track_op().then(|| tensor_of(gradient, input.shape().clone()));
        let wanted = wanted.transpose()?;
        let of_link = zeros::for_parent(link)?;
        let view = self.view.as_ref().and_then(|view| view.get());
        if let (Some(view), Some(gradient)) = (view, &wanted) {
            zeros::note_collective(
                &zeros::AppliedCollective { input, output, view: *view },
                gradient,
            )?;
        }
        Ok((wanted, of_link))
    }
}

/// Op that returns its first parent, a loss. The second parent is the last collective of a tape. So
/// this collective and all earlier ones take part in the backward, even if the loss does not depend
/// on them.
struct Tie;

impl CustomOp2 for Tie {
    fn name(&self) -> &'static str {
        "tie"
    }

    fn cpu_fwd(
        &self,
        loss: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> CandleResult<(CpuStorage, Shape)> {
        copy(loss, layout)
    }

    fn bwd(
        &self,
        loss: &Tensor,
        last: &Tensor,
        _tied: &Tensor,
        cotangent: &Tensor,
    ) -> CandleResult<(Option<Tensor>, Option<Tensor>)> {
        Ok((loss.track_op().then(|| cotangent.clone()), zeros::for_parent(last)?))
    }
}

/// Converts the counts of a collective from rows of `input` to elements.
fn in_elements(collective: &Collective, input: &Tensor) -> Collective {
    let len = row_len(input);
    let elements = |rows: &Vec<usize>| rows.iter().map(|rows| rows.saturating_mul(len)).collect();
    match collective {
        Collective::AllToAll { send, receive } => {
            Collective::AllToAll { send: elements(send), receive: elements(receive) }
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
fn output_shape(call: &CarrierCall<'_, Tensor>) -> Result<Option<Shape>, Error> {
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

fn rows(call: &CarrierCall<'_, Tensor>) -> Result<usize, Error> {
    let scalar = || refuse(call, "a scalar has no rows: reshape it to [1]".to_owned());
    call.input.dims().first().copied().ok_or_else(scalar)
}

/// Returns the number of rows of all members together. Refuses rows without elements whose number
/// overflows `usize`.
fn rows_of_all(call: &CarrierCall<'_, Tensor>) -> Result<usize, Error> {
    let rows = rows(call)?;
    let size = call.group.size();
    let what = || format!("the input has {rows} rows, and those of {size} members overflow");
    rows.checked_mul(size).ok_or_else(|| refuse(call, what()))
}

fn own_rows(call: &CarrierCall<'_, Tensor>) -> Result<usize, Error> {
    let rows = rows(call)?;
    let size = call.group.size();
    if rows.is_multiple_of(size) {
        return Ok(rows / size);
    }
    let what = format!("the input has {rows} rows, {size} members need a multiple of {size}");
    Err(refuse(call, what))
}

fn check_sent(call: &CarrierCall<'_, Tensor>, send: &[usize]) -> Result<(), Error> {
    let rows = rows(call)?;
    if sum(send) == Some(rows) {
        return Ok(());
    }
    Err(refuse(call, format!("the input has {rows} rows, the counts to send are {send:?}")))
}

/// Returns the number of rows that this rank receives. Refuses counts whose elements overflow
/// `usize`.
fn received(call: &CarrierCall<'_, Tensor>, receive: &[usize]) -> Result<usize, Error> {
    let len = row_len(call.input);
    let rows = sum(receive).filter(|rows| rows.checked_mul(len).is_some());
    let what =
        || format!("the counts to receive are {receive:?}, of {len} elements each, which overflow");
    rows.ok_or_else(|| refuse(call, what()))
}

fn sum(counts: &[usize]) -> Option<usize> {
    counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count))
}

fn with_rows(call: &CarrierCall<'_, Tensor>, rows: usize) -> Shape {
    let mut dims = call.input.dims().to_vec();
    if let Some(first) = dims.first_mut() {
        *first = rows;
    }
    dims.into()
}

/// Returns the error of a collective that cannot be applied to this tensor. It has not been issued.
fn refuse(call: &CarrierCall<'_, Tensor>, what: String) -> Error {
    let operation = call.collective.name();
    hsdp::Error::Collective { operation, rank: call.group.rank(), what }.into()
}

#[cfg(test)]
mod tests {
    use candle_core::Var;
    use hsdp::collective::Copies;
    use hsdp_comm::Channel;

    use super::*;

    /// Returns a broadcast on a world of one rank as an op, with its input and the link before it.
    fn recorded() -> (CollectiveOp<f64>, [Tensor; 2]) {
        let input = Var::new(&[1.0, 2.0], &Device::Cpu).expect("two elements");
        let input = input.as_tensor().clone();
        let group = &hsdp::World::single().world_group(Channel::User);
        let collective = &Collective::Broadcast { root: 0, output: Copies::Replicate };
        let record = Recording::Gradients;
        let call = CarrierCall { collective, input: &input, group, after: None, record };
        let forward = collective.forward(group, Tag::default(), vec![1.0, 2.0]);
        let (output, backward) = forward.expect("a group of one rank");
        let output = output.expect("the root has it");
        let link = Var::zeros((), DType::F32, &Device::Cpu).expect("a scalar");
        let op = CollectiveOp::new(&call, backward, Some((output, input.shape().clone())));
        (op, [input.clone(), link.as_tensor().clone()])
    }

    #[test]
    fn a_gradient_that_is_itself_differentiated_is_refused_by_name() {
        let (op, [input, link]) = recorded();
        let cotangent = input.sqr().expect("it depends on a variable");
        let error = op.bwd(&input, &link, &input, &cotangent).expect_err("candle would lose it");
        let message = Error::from(error).to_string();
        assert!(message.starts_with("broadcast on rank 0: its gradient is to be"), "{message}");
    }

    #[test]
    fn its_backward_may_run_again_and_both_parents_get_something() {
        let (op, [input, link]) = recorded();
        let cotangent = Tensor::new(&[3.0, 4.0], &Device::Cpu).expect("two elements");
        for _ in 0..2 {
            let (gradient, order) =
                op.bwd(&input, &link, &input, &cotangent).expect("a gradient, each time");
            let gradient = gradient.expect("the input is a variable");
            assert_eq!(gradient.to_vec1::<f64>().expect("f64"), [3.0, 4.0]);
            let order = order.expect("the link is a variable");
            assert_eq!(order.to_scalar::<f32>().expect("f32"), 0.0);
        }
    }

    #[test]
    fn a_parent_that_nobody_tracks_gets_nothing() {
        let (op, [input, link]) = recorded();
        let cotangent = Tensor::new(&[3.0, 4.0], &Device::Cpu).expect("two elements");
        let (gradient, order) = op
            .bwd(&input.detach(), &link.detach(), &input, &cotangent)
            .expect("the collective takes place");
        assert!(gradient.is_none() && order.is_none());
    }
}
