//! A trial forward and backward of a recorded model, which finds parameters without a gradient.

mod report;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use hsdp_sharding::{Param, Role};
use parking_lot::Mutex;

use super::{Recorded, RecordedParameter, initial};
use crate::error::{DeclarationError, Error, LostGradients};

/// Seed of the values of a trial. Values differ from each other, so that the tokens of a mixture of
/// experts choose several experts.
const SEED: u64 = 0;

impl Recorded {
    /// Checks that a loss has a gradient for each trainable parameter. Not collective.
    ///
    /// Some functions of candle-nn have no backward and cut the graph without an error, so that a
    /// model trains only a few of its parameters. Call this once, before the first step:
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Result, Tensor};
    /// # use candle_nn::{Linear, RmsNorm, VarBuilder, linear, rms_norm};
    /// use hsdp_candle::record;
    ///
    /// fn load(vb: VarBuilder) -> Result<(Linear, RmsNorm, Linear)> {
    ///     let norm = rms_norm(4, 1e-5, vb.pp("norm"))?; // Its forward cuts the graph.
    ///     Ok((linear(4, 4, vb.pp("first"))?, norm, linear(4, 2, vb.pp("head"))?))
    /// }
    /// fn loss(vb: VarBuilder) -> Result<Tensor> {
    ///     let (first, norm, head) = load(vb)?;
    ///     let x = Tensor::zeros((1, 4), DType::F32, &Device::Cpu)?;
    ///     head.forward(&norm.forward(&first.forward(&x)?)?)?.sum_all()
    /// }
    ///
    /// let error = record(load)?.check_backward(loss).expect_err("a cut");
    /// assert!(error.to_string().contains("norm.weight; first.{weight,bias};"));
    /// # Ok::<(), hsdp_candle::Error>(())
    /// ```
    ///
    /// `loss` makes the model from the builder, as for [`record`](super::record), and returns the
    /// loss of a small input. The input may be zeros, but a model with experts needs enough tokens
    /// to reach each of them. The builder returns values by the recorded hints, in the requested
    /// dtype. Parameters that are frozen with [`map`](Self::map) need no gradient.
    ///
    /// A parameter passes if it has any gradient. A packed weight of queries, keys and values that
    /// loses the first two passes, because the values have a gradient.
    ///
    /// The check runs one forward and one backward on the CPU, without shards. It needs memory for
    /// all parameters and all their gradients in f32, and for the activations.
    ///
    /// # Errors
    /// [`LostGradients::NoGradient`](crate::LostGradients::NoGradient), which lists all parameters
    /// without a gradient. [`DeclarationError::Buffers`](crate::DeclarationError::Buffers),
    /// [`DeclarationError::Reshaped`](crate::DeclarationError::Reshaped) and candle's error of a
    /// missing tensor if `loss` asks for something that was not recorded. The errors of `loss` and
    /// of candle's backward.
    pub fn check_backward(
        &self,
        loss: impl FnOnce(VarBuilder<'static>) -> CandleResult<Tensor>,
    ) -> Result<(), Error> {
        let trial = Arc::new(Trial { recorded: self.clone(), made: Mutex::default() });
        let backend = Box::new(TrialBackend(Arc::clone(&trial)));
        let loss = loss(VarBuilder::from_backend(backend, DType::F32, Device::Cpu))?;
        let backward = |error: candle_core::Error| error.context("backward of the check");
        let gradients = loss.backward().map_err(backward)?;
        let made = trial.made.lock();
        let without = |param: &&Param| {
            param.role == Role::Trainable
                && made.get(&param.name).is_none_or(|made| gradients.get(made).is_none())
        };
        let lost: Vec<&Param> = self.params().filter(without).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let trainable = self.params().filter(|param| param.role == Role::Trainable).count();
        Err(Error::LostGradients(LostGradients::NoGradient {
            trainable,
            listed: report::listed(&lost),
            causes: report::causes(&lost, |name| made.contains_key(name)),
            parameters: lost.iter().map(|param| param.name.clone()).collect(),
        }))
    }
}

/// Tensors of a trial.
struct Trial {
    recorded: Recorded,
    /// Requested tensors by name. Trainable parameters are variables.
    made: Mutex<HashMap<String, Tensor>>,
}

impl Trial {
    /// Returns the tensor of a recorded parameter, the same one each time.
    fn tensor(&self, name: &str, shape: Option<&Shape>) -> CandleResult<Tensor> {
        let found = self.recorded.parameters.iter().find(|it| it.param.name == name);
        let Some(RecordedParameter { param, init, .. }) = found else {
            return Err(candle_core::Error::CannotFindTensor { path: name.to_owned() }
                .context("the constructors that were recorded did not ask for this parameter"));
        };
        if let Some(shape) = shape.filter(|shape| shape.dims() != param.shape) {
            Err(Error::Declaration(DeclarationError::Reshaped {
                parameter: name.to_owned(),
                first: param.shape.clone(),
                second: shape.dims().to_vec(),
            }))?;
        }
        let mut made = self.made.lock();
        if let Some(tensor) = made.get(name) {
            return Ok(tensor.clone());
        }
        let values = initial::values(param, *init, SEED);
        let tensor = Tensor::from_vec(values, param.shape.as_slice(), &Device::Cpu)?;
        let tensor = match param.role {
            Role::Trainable => Var::from_tensor(&tensor)?.into_inner(),
            Role::Frozen => tensor,
        };
        made.insert(name.to_owned(), tensor.clone());
        Ok(tensor)
    }

    /// Converts the tensor to the requested dtype and device.
    fn converted(
        &self,
        name: &str,
        shape: Option<&Shape>,
        dtype: DType,
        device: &Device,
    ) -> CandleResult<Tensor> {
        if dtype.is_int() {
            Err(Error::Declaration(DeclarationError::Buffers {
                names: format!("{name} (of {})", dtype.as_str()),
            }))?;
        }
        self.tensor(name, shape)?.to_dtype(dtype)?.to_device(device)
    }
}

struct TrialBackend(Arc<Trial>);

impl SimpleBackend for TrialBackend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> CandleResult<Tensor> {
        self.0.converted(name, Some(&shape), dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> CandleResult<Tensor> {
        self.0.converted(name, None, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.recorded.params().any(|param| param.name == name)
    }
}
