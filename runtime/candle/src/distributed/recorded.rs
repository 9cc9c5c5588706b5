//! The custom op that represents a collective in candle's graph.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, TensorId, bail};
use hsdp::Rank;
use hsdp::collective::Backward;
use hsdp::dist::Call;
use parking_lot::Mutex;

use super::elements::{Real, elements_of, tensor_of};
use crate::error::Error;
use crate::zeros::{self, Applied};

/// An applied collective with two parents: its input, and the link of the collective before it.
///
/// The second parent carries no value. It sets the order: candle runs the backward of an op before
/// the backwards of its parents, so the later one of two collectives runs its backward first, on
/// all ranks.
pub(super) struct Recorded<T> {
    name: &'static str,
    rank: Rank,
    backward: Backward<T>,
    shape: Shape,
    output: Mutex<Option<Vec<T>>>,
    /// View of the output that the program has.
    view: Arc<OnceLock<TensorId>>,
}

impl<T: Real> Recorded<T> {
    pub(super) fn new(
        call: &Call<'_, Tensor>,
        backward: Backward<T>,
        (output, shape): (Vec<T>, Shape),
    ) -> Self {
        let (name, rank) = (call.collective.name(), call.group.rank());
        let (output, view) = (Mutex::new(Some(output)), Arc::default());
        Self { name, rank, backward, shape, output, view }
    }

    /// Returns the place for the view of the output that the program gets.
    pub(super) fn view(&self) -> Arc<OnceLock<TensorId>> {
        Arc::clone(&self.view)
    }

    fn forward(&self) -> Result<(CpuStorage, Shape)> {
        let Some(output) = self.output.lock().take() else { bail!("{} runs once", self.name) };
        Ok((T::to_cpu_storage_owned(output), self.shape.clone()))
    }

    /// Runs the backward, even if neither parent needs its gradient. Returns the gradients of both.
    fn gradients(
        &self,
        [input, link]: [&Tensor; 2],
        cotangent: Option<&Tensor>,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        if cotangent.is_some_and(Tensor::track_op) {
            return Err(Error::from(self.differentiated_twice()).into());
        }
        let cotangent = cotangent.map(elements_of).transpose()?;
        let gradient = self.backward.gradient(cotangent).map_err(Error::from)?;
        let wanted = input.track_op().then(|| tensor_of(gradient, input.shape().clone()));
        Ok((wanted.transpose()?, zeros::for_parent(link)?))
    }

    fn differentiated_twice(&self) -> hsdp::Error {
        let what = "its gradient is to be differentiated, which candle cannot do for collectives: run \
                    one backward, with CANDLE_GRAD_DO_NOT_DETACH unset";
        hsdp::Error::Collective { operation: self.name, rank: self.rank, what: what.to_owned() }
    }
}

impl<T: Real> CustomOp2 for Recorded<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward()
    }

    fn bwd(
        &self,
        input: &Tensor,
        link: &Tensor,
        output: &Tensor,
        cotangent: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = self.gradients([input, link], Some(cotangent))?;
        if let (Some(view), Some(gradient)) = (self.view.get(), &gradients.0) {
            zeros::note_collective(&Applied { input, output, view: *view }, gradient)?;
        }
        Ok(gradients)
    }
}

/// A collective without an output on this rank. In candle's graph its output is a scalar with an
/// unused cotangent.
pub(super) struct Nowhere<T>(pub(super) Recorded<T>);

impl<T: Real> CustomOp2 for Nowhere<T> {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward()
    }

    fn bwd(
        &self,
        input: &Tensor,
        link: &Tensor,
        _scalar: &Tensor,
        _nothing: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.0.gradients([input, link], None)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use hsdp::collective::{Collective, Copies};
    use hsdp::dist::Record;
    use hsdp_comm::{Channel, Tag};

    use super::*;

    /// Returns a broadcast on a world of one rank as an op, with its input and the link before it.
    fn recorded() -> (Recorded<f64>, [Tensor; 2]) {
        let input = Var::new(&[1.0, 2.0], &Device::Cpu).expect("two elements");
        let input = input.as_tensor().clone();
        let group = &hsdp::World::single().world_group(Channel::User);
        let collective = &Collective::Broadcast { root: 0, output: Copies::Replicate };
        let (tag, record) = (Tag::default(), Record::Gradients);
        let call = Call { collective, input: &input, group, tag, after: None, record };
        let (output, backward) =
            collective.forward(group, tag, vec![1.0, 2.0]).expect("a group of one rank");
        let output = (output.expect("the root has it"), input.shape().clone());
        let link = Var::zeros((), candle_core::DType::F32, &Device::Cpu).expect("a scalar");
        (Recorded::new(&call, backward, output), [input, link.as_tensor().clone()])
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
