//! A microbatch driven by candle's autograd.

mod graph;
mod reader;
mod recomputed;
mod start;

use std::collections::{HashMap, HashSet};
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Tensor, Var};
use hsdp::{FullCopies, ParamId, PassHandle};
use hsdp_sharding::Role;
use parking_lot::Mutex;

use self::graph::PassGraph;
use self::reader::PassReader;
use self::start::{LossForm, Start};
use crate::convert::{candle_dtype, cast_inputs, cast_output, casts_inputs, is_in_16_bits};
use crate::error::{CUTS, DeclarationError, Error, LostGradients};
use crate::layer::{in_graph, through};
use crate::model::{Forward, RepeatableForward, Units};
use crate::ops::{BeforeBackward, IdentityOp, InputOp};
use crate::recompute::is_differentiated;
use crate::unit::{BackwardHere, InputWatch, LiveUnit, PassKind, PassState, UnitUsage};
use crate::variables::{Reached, VariableGradient, VariablePurpose, WantedGradients};
use crate::zeros::{self, CutInput, ZeroSearch};

/// One forward and backward of a model in candle, on parameters that exist only while they are
/// needed. On a [batch](hsdp::Evaluation::batch) of an evaluation it is a forward alone, which
/// makes no graph and ends with [`finish`](Self::finish).
///
/// A loss may depend on the pass of another model, if that is a batch of an evaluation [with a
/// backward](hsdp::ShardedModel::evaluation_with_backward), as in a GAN, or with a perceptual loss.
/// The parameters of the other model are constants then, and its units are gathered again where the
/// [`backward`](Self::backward) of this pass comes to them. Finish the batch after that backward:
///
/// ```
/// # use candle_core::Tensor;
/// # use hsdp_candle::prelude::*;
/// # fn microbatch(
/// #     step: &mut hsdp::Step<'_>,
/// #     evaluation: &mut hsdp::Evaluation<'_>,
/// #     noise: &Tensor,
/// # ) -> Result<(), hsdp_candle::Error> {
/// let generator = Pass::new(step.microbatch()?)?;
/// let critic = Pass::new(evaluation.batch()?)?; // of `evaluation_with_backward`
/// let made = generator.unit("make", noise, |p, x| x.matmul(&p.get("make.w")?)?.tanh())?;
/// let score = critic.unit("judge", &made, |p, x| x.matmul(&p.get("judge.w")?))?;
/// generator.backward(&score.neg()?.mean_all()?, 1)?;
/// critic.finish()?;
/// # Ok(())
/// # }
/// ```
///
/// [`unit`](crate::UnitsExt::unit) gathers a unit's parameters, runs its forward on them, and frees
/// them. [`backward`](Self::backward) gathers them again unit by unit, and reduces their gradients
/// as soon as they are complete. [`recomputed`](crate::UnitsExt::recomputed) also drops the tensors
/// that a forward makes, and the backward makes them again, unit by unit. A parameter that is read
/// twice, by one unit or by several, is one tensor.
///
/// A unit must be marked [`keep`](hsdp_sharding::Unit::keep) if it runs more than once in a
/// forward, or if another unit reads one of its parameters (by a tied name, say).
#[derive(Debug)]
#[must_use = "a microbatch that is not finished fails its step"]
pub struct Pass<'step> {
    /// The pass of the runtime, until a backward or `finish` takes it.
    inner: Mutex<Option<hsdp::Pass<'step>>>,
    handle: PassHandle,
    units: LiveUnits,
    /// Parameters that were read in this microbatch.
    tensors: Mutex<HashMap<ParamId, Tensor>>,
    /// Whether the inputs of each unit are cast to the unit's compute dtype.
    casts_inputs: bool,
    device: Device,
    /// First parent of all parameters. It is a variable, so that candle tracks the tensors made
    /// from it.
    anchor: Var,
    /// Variables of the program whose gradients it has asked for.
    wanted: WantedGradients,
    graph: Arc<PassGraph>,
    watch: InputWatch,
    /// Whether to look for parameters that the loss does not depend on.
    seeks_cuts: bool,
    kind: PassKind,
}

impl<'step> Pass<'step> {
    /// Starts a microbatch that candle drives.
    ///
    /// # Errors
    /// [`Error::Candle`] if candle cannot make a variable; [`Error::Runtime`] if ranks share the
    /// model's full copies, because candle tensors own their elements.
    pub fn new(inner: hsdp::Pass<'step>) -> Result<Self, Error> {
        Self::on(inner, &Device::Cpu)
    }

    /// Starts a microbatch as [`new`](Self::new) does, with tensors on `device`. This is the CPU,
    /// or with the feature `candle-cuda` the GPU of the model. On a GPU each parameter is copied
    /// once, on the device, into memory of candle; gradients are lent without a copy. The rank's
    /// own thread must make the GPU's `device` with `candle_core::Device::new_cuda_with_stream`:
    /// devices made by `new_cuda` use a stream of the calling thread.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn on(inner: hsdp::Pass<'step>, device: &Device) -> Result<Self, Error> {
        let handle = inner.handle();
        if handle.plan().options().full_copies == FullCopies::PerProcess {
            let what = "tensors of candle own their elements, so ranks cannot share full copies";
            return Err(hsdp::Error::Options { what: what.to_owned() }.into());
        }
        let spec = handle.plan().spec();
        let kind = match (handle.is_evaluation(), handle.has_backward()) {
            (false, _) => PassKind::Training,
            (true, false) => PassKind::Evaluation,
            (true, true) => PassKind::EvaluationWithBackward,
        };
        let state = Arc::new(PassState::new(kind));
        let unit = |id| -> Result<_, Error> {
            let dtype = candle_dtype(handle.plan().compute_dtype(id))?;
            let state = Arc::clone(&state);
            Ok(Arc::new(LiveUnit::new(id, handle.clone(), dtype, device.clone(), state)))
        };
        let all = spec.unit_ids().map(unit).collect::<Result<_, _>>()?;
        let watch = match kind {
            PassKind::Training if spec.params().all(|(_, it)| it.role == Role::Trainable) => {
                InputWatch::Off
            }
            PassKind::Training | PassKind::EvaluationWithBackward => InputWatch::Inputs,
            PassKind::Evaluation => InputWatch::Off,
        };
        handle.explain_unused(CUTS);
        let seeks_cuts = kind != PassKind::Evaluation && handle.seeks_cuts();
        Ok(Self {
            inner: Mutex::new(Some(inner)),
            handle: handle.clone(),
            seeks_cuts,
            units: LiveUnits { all, state, has_ended: AtomicBool::new(false) },
            tensors: Mutex::default(),
            casts_inputs: casts_inputs(spec),
            device: device.clone(),
            anchor: VariablePurpose::Parameters.variable(device)?,
            wanted: WantedGradients::default(),
            graph: PassGraph::of(handle.clone(), kind),
            watch,
            kind,
        })
    }

    /// Records an error of a unit for the other ranks, and adds the unit to it.
    fn told<T>(&self, unit: &str, result: Result<T, Error>) -> Result<T, Error> {
        result.map_err(|error| {
            self.handle.note_failure(&format_args!("unit {unit}: {error}"));
            error.in_unit(unit)
        })
    }

    fn run(&self, name: &str, inputs: &[Tensor], forward: Forward<'_>) -> Result<Tensor, Error> {
        let own = self.find(name)?;
        let usage = UnitUsage::of(own);
        own.gather()?;
        let inputs = self.hooked(inputs, &usage)?;
        let reader = PassReader { pass: self, own, usage: &usage };
        let output = match self.casts_inputs {
            true => forward(&reader, &cast_inputs(&inputs, own.dtype())?)?,
            false => forward(&reader, &inputs)?,
        };
        let output = match output.track_op() {
            true => self.before_backward(own, &inputs, &output, &usage)?,
            // It may be a view of a parameter, which will be freed.
            false => output.copy()?,
        };
        usage.reshard()?;
        Ok(output)
    }

    /// Returns the inputs of a use with the hooks that watch them. A pass that looks for cuts gives
    /// several inputs new tensors: the output may depend on a skip connection through another
    /// input.
    fn hooked(&self, inputs: &[Tensor], usage: &Arc<UnitUsage>) -> Result<Vec<Tensor>, Error> {
        let hooked = |input: &Tensor| match self.watch {
            _ if !is_differentiated(input) => Ok(input.clone()),
            InputWatch::Inputs => {
                usage.watch_input();
                through(input, |it| it.apply_op1(IdentityOp::AfterBackward(Arc::clone(usage))))
            }
            InputWatch::Off if self.seeks_cuts && inputs.len() > 1 => {
                through(input, |it| it.broadcast_as(it.shape()))
            }
            InputWatch::Off => Ok(input.clone()),
        };
        Ok(inputs.iter().map(hooked).collect::<candle_core::Result<_>>()?)
    }

    /// Returns the output of a unit, with a backward that gathers the parameters.
    fn before_backward(
        &self,
        own: &LiveUnit,
        inputs: &[Tensor],
        output: &Tensor,
        usage: &Arc<UnitUsage>,
    ) -> Result<Tensor, Error> {
        let before: Option<HashSet<_>> =
            self.seeks_cuts.then(|| zeros::ids_before(output).collect());
        let is_parent = |input: &Tensor| {
            is_differentiated(input)
                && before.as_ref().is_none_or(|before| {
                    before.contains(&input.id()) || before.contains(&in_graph(input).id())
                })
        };
        let parents: Vec<bool> = inputs.iter().map(is_parent).collect();
        let mut chain = self.anchor.detach();
        for (input, _) in inputs.iter().zip(&parents).filter(|(_, is_parent)| **is_parent) {
            chain = chain.apply_op2(&in_graph(input), InputOp::default())?;
        }
        let hook = BeforeBackward(Arc::clone(usage));
        let output = through(output, |it| chain.apply_op2(it, hook))?;
        self.note_output(own, inputs, &parents, &output);
        Ok(output)
    }

    /// Records the output of a unit, and the inputs with variables before them that are no parents
    /// of it. candle keeps only some parents of a tensor without elements, and no gradient is lost
    /// there.
    fn note_output(&self, own: &LiveUnit, inputs: &[Tensor], parents: &[bool], output: &Tensor) {
        let is_empty = output.elem_count() == 0;
        let output = in_graph(output);
        self.graph.note_output(output.id());
        for (index, (input, is_parent)) in inputs.iter().zip(parents).enumerate() {
            let is_empty = input.elem_count() == 0 || is_empty;
            let is_cut = !is_parent && !is_empty && is_differentiated(input);
            if is_cut && zeros::has_variables_before(input) {
                let unit = own.name().to_owned();
                let output = output.id();
                self.graph.cuts.note(CutInput { unit, index, count: inputs.len(), output });
            }
        }
    }

    /// Requests the gradient of a variable of the program, which is no parameter of the model: an
    /// input, say, or a temperature that the program trains itself. The
    /// [`backward`](Self::backward) of this pass, which comes after this call, provides it. Not
    /// collective.
    ///
    /// It is the gradient of this rank's loss alone. Variables that all ranks train together are
    /// better declared as parameters, which are reduced, clipped, updated and saved.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor, Var};
    /// # use hsdp_candle::prelude::*;
    /// # fn microbatch(step: &mut hsdp::Step<'_>) -> Result<Tensor, hsdp_candle::Error> {
    /// let pass = Pass::new(step.microbatch()?)?;
    /// let x = Var::new(&[[1f32, 2., 3.]], &Device::Cpu)?;
    /// let gradient = pass.gradient_of(&x);
    /// let y = pass.unit("linear", &x, |p, x| x.matmul(&p.get("weight")?.t()?))?;
    /// pass.backward(&y.sqr()?.mean_all()?, 1)?;
    /// let gradient = gradient.get().expect("the loss depends on x"); // [1, 3], of the loss
    /// # Ok(gradient)
    /// # }
    /// ```
    pub fn gradient_of(&self, variable: &Var) -> VariableGradient {
        self.wanted.add(variable)
    }

    /// Runs the backward of a loss that is the mean over items of total weight `weight` (tokens,
    /// say), and ends the microbatch, even if it fails. Returns the loss. Each later call of the
    /// pass is refused.
    ///
    /// A loss in bf16 or f16 has gradients of full precision, but its value is read as it is, with
    /// 8 or 11 bits. Compute the loss in f32, from logits cast by [`Units::output`], to see more.
    ///
    /// Collective over the shard group, and in the first step over the world.
    ///
    /// # Errors
    /// [`LostGradients::Undeclared`](crate::LostGradients::Undeclared) if `loss` depends on a
    /// variable of the program whose gradient was not [asked for](Self::gradient_of);
    /// [`LostGradients::BesideOutput`](crate::LostGradients::BesideOutput) if it depends on a
    /// tensor that left a recomputed unit beside its output;
    /// [`LostGradients::OtherPass`](crate::LostGradients::OtherPass) if it depends on a unit that
    /// another pass runs, which is no batch of an evaluation [with a
    /// backward](hsdp::ShardedModel::evaluation_with_backward), and
    /// [`LostGradients::BatchFinished`](crate::LostGradients::BatchFinished) if that batch is over,
    /// and [`LostGradients::BatchUsed`](crate::LostGradients::BatchUsed) if the same forward has
    /// taken part in an earlier backward;
    /// [`LostGradients::Unweighted`](crate::LostGradients::Unweighted) and
    /// [`LostGradients::Unreached`](crate::LostGradients::Unreached) if the batch has counted in
    /// statistics over all ranks, and the loss has the weight 0 or does not depend on them;
    /// [`Error::Runtime`] if a collective fails, or if `loss` was computed in another microbatch;
    /// [`Error::Candle`] if `loss` is not a scalar of floats, or an op has no backward;
    /// [`Error::PassOver`] after another backward.
    pub fn backward(&self, loss: &Tensor, weight: u64) -> Result<f64, Error> {
        self.backward_of(loss, LossForm::Mean, weight)
    }

    /// Runs a backward as [`backward`](Self::backward) does, for a loss that is the sum over items
    /// of total weight `weight`.
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    pub fn backward_sum(&self, loss: &Tensor, weight: u64) -> Result<f64, Error> {
        self.backward_of(loss, LossForm::Sum, weight)
    }

    /// Ends a batch of an evaluation, or a microbatch without a backward, which then has the weight
    /// 0. A batch that takes part in the backward of another pass is finished after that backward.
    ///
    /// Collective over the shard group: it issues the gathers that this rank has not issued.
    ///
    /// # Errors
    /// [`Error::Runtime`] if a gather fails; [`Error::PassOver`] after a backward;
    /// [`LostGradients::Unweighted`](crate::LostGradients::Unweighted) if the batch has counted in
    /// statistics over all ranks.
    pub fn finish(self) -> Result<(), Error> {
        let inner = self.end("`finish`")?;
        self.check_counted()?;
        self.finish_units(inner)
    }

    /// Refuses a microbatch without weight in which values of this rank counted in the statistics
    /// of all ranks.
    fn check_counted(&self) -> Result<(), Error> {
        let Some(unit) = self.units.state.counted() else { return Ok(()) };
        let unit = self.handle.plan().spec()[unit].name.clone();
        let error = Error::LostGradients(LostGradients::Unweighted { unit });
        self.handle.note_failure(&error);
        Err(error)
    }

    /// Takes the pass of the runtime for the call that ends the microbatch.
    fn end(&self, call: &str) -> Result<hsdp::Pass<'step>, Error> {
        self.inner.lock().take().ok_or_else(|| Error::PassOver { call: call.to_owned() })
    }

    fn finish_units(&self, inner: hsdp::Pass<'_>) -> Result<(), Error> {
        self.units.all.iter().rev().try_for_each(|unit| unit.finish())?;
        Ok(inner.finish()?)
    }

    fn backward_of(&self, loss: &Tensor, form: LossForm, weight: u64) -> Result<f64, Error> {
        let reached = Reached::from(loss);
        let result = self.end("a backward").and_then(|inner| {
            let result = self.run_backward(inner, loss, &reached, form, weight);
            self.units.end();
            self.tensors.lock().clear();
            result
        });
        result.inspect_err(|error| {
            let failure = format_args!("backward: {error}");
            self.handle.note_failure(&failure);
            // The program may drop their evaluations first.
            let joined = PassGraph::of_evaluations().into_iter();
            let joined = joined.filter(|graph| graph.is_reached(&reached));
            joined.for_each(|graph| graph.handle.note_failure(&failure));
        })
    }

    fn run_backward(
        &self,
        mut inner: hsdp::Pass<'_>,
        loss: &Tensor,
        reached: &Reached,
        form: LossForm,
        weight: u64,
    ) -> Result<f64, Error> {
        if !loss.dims().is_empty() || loss.dtype().is_int() {
            let shape = loss.dims();
            let dtype = loss.dtype().as_str();
            let what = format!(
                "a loss must be a scalar of a float dtype, this one is {shape:?} of {dtype}"
            );
            return Err(candle_core::Error::Msg(what).into());
        }
        let evaluations = PassGraph::of_evaluations();
        if self.kind == PassKind::Training {
            let mut graphs = iter::once(&self.graph).chain(&evaluations);
            graphs.try_for_each(|graph| graph.first_runs.check(reached, &"the loss"))?;
            self.wanted.check(reached)?;
        }
        let is_reached = |graph: &Arc<PassGraph>| graph.is_reached(reached);
        let joined: Vec<_> = evaluations.into_iter().filter(is_reached).collect();
        let value = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        let seed = inner.loss(form.loss(value, weight))?;
        // The mean over no items is NaN, and its gradient would be, too. Such a loss has the seed
        // 0.
        if seed.value() == 0.0 {
            self.check_counted()?;
            if !joined.is_empty() {
                // The other ranks wait for the gathers of this one in the order of the graph. The
                // runtime drops the gradients of a loss without weight.
                self.differentiate(loss, reached, Start::WITHOUT_WEIGHT)?;
            }
            self.wanted.deliver(reached, Tensor::zeros_like)?;
        } else {
            let narrowest = self.narrowest_dtype(reached, &joined);
            let start = Start::of(seed, form, [loss.dtype(), narrowest]);
            self.warn_of_cuts(reached, &joined);
            self.differentiate(loss, reached, start)?;
            self.units.all.iter().try_for_each(|unit| unit.check_statistics())?;
        }
        self.finish_units(inner)?;
        Ok(value)
    }

    /// Warns of the units that cut the graph after an input, and that the backward reaches, in this
    /// pass and in those of evaluations.
    fn warn_of_cuts(&self, reached: &Reached, joined: &[Arc<PassGraph>]) {
        let graphs = iter::once(&self.graph).chain(joined);
        let inputs: Vec<_> = graphs.flat_map(|graph| graph.cuts.described(reached)).collect();
        if !inputs.is_empty() {
            self.handle.note_cuts();
            hsdp_warnings::warn!(
                "no gradient comes to the input of unit {}: an operation without a backward or a \
                 detach cuts the graph there",
                inputs.join(", ")
            );
        }
    }

    /// Runs candle's backward. The ops of the graph deliver the gradients of parameters.
    fn differentiate(&self, loss: &Tensor, reached: &Reached, start: Start) -> Result<(), Error> {
        let _span = tracing::info_span!("backward").entered();
        self.units.state.begin_backward(start.outside);
        let search = (self.seeks_cuts && reached.collectives).then(|| ZeroSearch::begin(loss));
        let gradients = {
            let _backward = BackwardHere::begin();
            start.scaled(loss)?.backward()?
        };
        if search.is_some_and(ZeroSearch::end) {
            self.handle.note_cuts();
        }
        if reached.anchors.iter().any(|anchor| anchor.id() != self.anchor.id()) {
            return Err(Error::LostGradients(LostGradients::OtherPass {
                what: "parameters".to_owned(),
            }));
        }
        self.wanted.deliver(reached, |variable| match gradients.get(variable) {
            Some(gradient) => start.unscaled(gradient),
            None => variable.zeros_like(),
        })?;
        Ok(())
    }

    /// Returns a 16-bit dtype that a unit computes in or a forward casts to, in this pass or in
    /// those of evaluations, or f32 if there is none.
    fn narrowest_dtype(&self, reached: &Reached, joined: &[Arc<PassGraph>]) -> DType {
        let mut dtypes = self.units.all.iter().map(|unit| unit.dtype());
        let of_units = dtypes.find(|dtype| is_in_16_bits(*dtype));
        let mut graphs = iter::once(&self.graph).chain(joined);
        let of_runs = || graphs.find_map(|graph| graph.first_runs.rounds_to());
        of_units.or(reached.rounds_to).or_else(of_runs).unwrap_or(DType::F32)
    }

    /// Finds a unit to run.
    fn find(&self, name: &str) -> Result<&Arc<LiveUnit>, Error> {
        if self.inner.lock().is_none() {
            return Err(Error::PassOver { call: format!("unit {name}") });
        }
        let units = self.handle.plan().spec().units();
        match units.iter().position(|unit| unit.name == name) {
            Some(index) => Ok(&self.units.all[index]),
            None => Err(Error::Declaration(DeclarationError::unknown_unit(name, units))),
        }
    }
}

impl Units for Pass<'_> {
    fn run_unit(
        &self,
        name: &str,
        inputs: &[Tensor],
        forward: Forward<'_>,
    ) -> candle_core::Result<Tensor> {
        Ok(self.told(name, self.run(name, inputs, forward))?)
    }

    fn run_recomputed(
        &self,
        name: &str,
        inputs: &[Tensor],
        forward: RepeatableForward,
    ) -> candle_core::Result<Tensor> {
        if self.kind == PassKind::Evaluation {
            return self.run_unit(name, inputs, Box::new(|p, inputs| forward(p, inputs)));
        }
        Ok(self.told(name, self.run_first(name, inputs, forward))?)
    }

    fn output(&self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        cast_output(self.handle.precision(), tensor)
    }
}

/// Guard that frees the remaining parameters when the microbatch ends, with or without an error.
/// Tensors of its graph may live on.
#[derive(Debug)]
struct LiveUnits {
    all: Vec<Arc<LiveUnit>>,
    state: Arc<PassState>,
    has_ended: AtomicBool,
}

impl LiveUnits {
    /// Frees the parameters, once.
    fn end(&self) {
        if self.has_ended.swap(true, Ordering::Relaxed) {
            return;
        }
        self.state.end_forward();
        for unit in &self.all {
            if let Err(error) = unit.end() {
                hsdp_warnings::error!(%error, "a unit could not be freed");
            }
        }
    }
}

impl Drop for LiveUnits {
    fn drop(&mut self) {
        self.end();
    }
}
