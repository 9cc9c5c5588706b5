//! candle as an autograd that records collectives.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use hsdp::collective::Backward;
use hsdp::dist::{Applied, Call, Carrier, Record};

use super::elements::{Real, elements_of, tensor_of};
use super::recorded::{Nowhere, Recorded};
use super::tie::Tie;
use super::{integers, refuse, rows};
use crate::error::Error;
use crate::variables::Purpose;

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

    fn apply(call: &Call<'_, Tensor>) -> Result<Applied<Tensor>, Error> {
        if !matches!(call.input.device(), Device::Cpu) {
            let what = format!("the input is on {:?}, not on the CPU", call.input.device());
            return Err(refuse(call, what));
        }
        match (call.input.dtype(), call.record) {
            (DType::F64, _) => real::<f64>(call),
            (DType::F32, _) => real::<f32>(call),
            (DType::F16, _) => real::<f16>(call),
            (DType::BF16, _) => real::<bf16>(call),
            (DType::I64, Record::Nothing) => integers::apply::<i64>(call),
            (DType::I32, Record::Nothing) => integers::apply::<i32>(call),
            (DType::U32, Record::Nothing) => integers::apply::<u32>(call),
            (dtype, Record::Gradients) => {
                let hint = "use f64, f32, f16 or bf16, or for integers a tape without gradients";
                Err(refuse(call, format!("dtype {} has no gradient: {hint}", dtype.as_str())))
            }
            (dtype, Record::Nothing) => {
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
            let (shape, dtype) = (loss.shape(), loss.dtype().as_str());
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

fn real<T: Real>(call: &Call<'_, Tensor>) -> Result<Applied<Tensor>, Error> {
    let shape = rows::output_shape(call)?;
    let collective = rows::in_elements(call.collective, call.input);
    let input = elements_of::<T>(call.input)?;
    let (output, backward) = collective.forward(call.group, call.tag, input)?;
    if call.record == Record::Nothing {
        let output = output.zip(shape).map(|(output, shape)| tensor_of(output, shape));
        return Ok(Applied { output: output.transpose()?, link: None });
    }
    let after = call.after.map_or_else(first_link, |after| Ok(after.clone()))?;
    match output.zip(shape) {
        Some((output, shape)) => {
            let op = Recorded::new(call, backward, (output, shape));
            let view = op.view();
            let link = call.input.apply_op2(&after, op)?;
            // The link is a parent of the next collective, so it does not show whether the output
            // is used.
            let output = Candle::alias(&link)?;
            let _ = view.set(output.id());
            Ok(Applied { output: Some(output), link: Some(link) })
        }
        None => nowhere(call, backward, &after),
    }
}

/// Records a collective without an output on this rank. Its backward takes part all the same.
fn nowhere<T: Real>(
    call: &Call<'_, Tensor>,
    backward: Backward<T>,
    after: &Tensor,
) -> Result<Applied<Tensor>, Error> {
    let op = Nowhere(Recorded::new(call, backward, (vec![T::zero()], ().into())));
    let link = call.input.apply_op2(after, op)?;
    Ok(Applied { output: None, link: Some(link) })
}

/// Returns the start of the chain of collectives. candle's backward skips tensors that depend on no
/// variable, and these may differ from rank to rank. With this variable, every collective depends
/// on one, on all ranks.
fn first_link() -> Result<Tensor, Error> {
    Ok(Purpose::Collectives.variable(&Device::Cpu)?.into_inner())
}
