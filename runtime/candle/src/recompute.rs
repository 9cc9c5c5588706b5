//! The second run of a recomputed unit, in the backward.
//!
//! ```text
//!   anchor --> InputOp --> InputOp --> RecomputeOp --> output    candle's graph
//!                 ^           ^
//!               input       input
//!
//!   variables of inputs --------+
//!                               +--> forward     the graph of a second run,
//!   variables of parameters ----+                inside RecomputeOp's backward
//! ```
//!
//! The backward of the second run begins with the gradient of the output. Its gradients are passed
//! to the units, as from [`Unshard`](crate::ops::Unshard), and to each input: to its cell, if a
//! scalar represents it in candle's graph, or to its [`InputOp`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

#[cfg(feature = "candle-cuda")]
use candle_core::CudaStorage;
use candle_core::backprop::GradStore;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, TensorId, Var,
    bail,
};
use hsdp::{BufferId, ModelSpec, ParamId};
use hsdp_sharding::Role;
use parking_lot::Mutex;

use crate::error::{Error, LostGradients};
use crate::gradient::{Gradient, GradientCell, GradientSum};
use crate::layer::{Node, can_be_node, copied, plain, viewed};
use crate::model::{ForwardMode, Parameters, RepeatableForward};
use crate::ops::{IdentityOp, InputOp};
use crate::statistics::{self, BatchStatistics, RecordedSums};
use crate::storage::{copy, move_back, take_storage};
use crate::unit::{LiveUnit, UnitUsage};
use crate::variables::Reached;
use crate::zeros;

/// Returns whether candle's backward reaches this tensor: it has a history, and is not of integers.
pub(crate) fn is_differentiated(tensor: &Tensor) -> bool {
    tensor.track_op() && tensor.dtype().is_float()
}

/// Makes the input of one run: a tensor without a history, which is a variable if candle's backward
/// reaches the input of the use.
pub(crate) fn input_leaf(input: &Tensor) -> Result<Tensor> {
    match is_differentiated(input) {
        true => Ok(Var::from_tensor(&input.detach())?.into_inner()),
        false => Ok(input.detach()),
    }
}

/// A variable of a second run, whose elements are those of a parameter or of an input.
struct RunVariable {
    tensor: Tensor,
    /// The variable: the scalar that represents the tensor in candle's graph, or the tensor.
    variable: Tensor,
    /// Gradient of a tensor that a scalar represents.
    cell: Option<Arc<GradientCell>>,
}

impl RunVariable {
    /// Makes a variable with these elements.
    fn new(elements: Storage, like: &Tensor) -> Result<Self> {
        let shape = like.shape().clone();
        if !can_be_node(like) {
            let tensor = Tensor::from_storage(elements, shape, BackpropOp::none(), true);
            return Ok(Self { variable: tensor.clone(), tensor, cell: None });
        }
        let variable = Var::new(0_f32, &Device::Cpu)?.into_inner();
        let cell = Arc::<GradientCell>::default();
        let tensor = viewed(variable.clone(), Arc::clone(&cell), elements, shape)?;
        Ok(Self { tensor, variable, cell: Some(cell) })
    }

    /// Makes the variable of an input, by a copy, or a constant if candle's backward does not reach
    /// the input.
    fn of_input(input: &Tensor) -> Result<Self> {
        if !is_differentiated(input) || !can_be_node(input) {
            let tensor = input_leaf(input)?;
            return Ok(Self { variable: tensor.clone(), tensor, cell: None });
        }
        Self::new(copied(input)?, input)
    }

    /// Takes the gradient. `None` if the output of the run does not depend on the variable.
    fn gradient(&self, gradients: &mut GradStore) -> Option<GradientSum> {
        match &self.cell {
            Some(cell) => cell.take_all(),
            // candle's gradients have a history, which keeps tensors of this run alive.
            None => gradients.remove(&self.variable).map(|it| GradientSum::Tensor(it.detach())),
        }
    }
}

/// An input of a recomputed use.
pub(crate) struct RecomputedInput {
    /// The input, without a history if the output does not depend on it.
    pub(crate) tensor: Tensor,
    /// Node of the input, if a scalar represents it.
    node: Option<Arc<Node>>,
    /// Op in candle's graph that gives the input its gradient. With a node this is the number of
    /// gradients that the use has added.
    pub(crate) op: InputOp,
}

impl From<Tensor> for RecomputedInput {
    fn from(tensor: Tensor) -> Self {
        Self { node: Node::known(&tensor), tensor, op: InputOp::default() }
    }
}

impl RecomputedInput {
    /// Returns the tensor that stands for the input in candle's graph.
    pub(crate) fn in_graph(&self) -> &Tensor {
        self.node.as_ref().map_or(&self.tensor, |node| &node.scalar)
    }

    fn set_gradient(&self, gradient: GradientSum) -> Result<()> {
        let of_op = match &self.node {
            Some(node) => {
                node.cell.add(gradient)?;
                GradientCell::one(&node.scalar)?
            }
            None => Some(gradient.into_tensor_like(&self.tensor)?),
        };
        if let Some(of_op) = of_op {
            self.op.set_gradient(of_op);
        }
        Ok(())
    }
}

/// The output of a recomputed use.
pub(crate) enum RecomputedOutput {
    /// An output whose gradient candle computes. The tensor is that of the first run until it
    /// becomes the output of the op.
    OfOp(Mutex<Option<Tensor>>),
    /// An output that a scalar represents.
    Viewed {
        cell: Arc<GradientCell>,
        /// The output, without a history.
        output: Arc<OnceLock<Tensor>>,
    },
}

impl RecomputedOutput {
    /// Takes the output of the first run, without a history.
    pub(crate) fn of(output: &Tensor) -> Self {
        match can_be_node(output) {
            true => Self::Viewed { cell: Arc::default(), output: Arc::default() },
            false => Self::OfOp(Mutex::new(Some(output.clone()))),
        }
    }

    /// Takes the output of the first run from an op that has not run.
    fn take(&self) -> Result<Tensor> {
        match self {
            Self::OfOp(output) if let Some(output) = output.lock().take() => Ok(output),
            Self::OfOp(_) => bail!("a recomputed unit ran its first forward twice"),
            Self::Viewed { .. } => {
                bail!("the output of a recomputed unit is on another device than its pass")
            }
        }
    }
}

/// A parameter that a recomputed use reads.
pub(crate) struct RecomputedRead {
    pub(crate) unit: Arc<LiveUnit>,
    /// Index of the parameter in the unit.
    pub(crate) index: usize,
}

impl RecomputedRead {
    pub(crate) fn is(&self, id: ParamId) -> bool {
        (self.unit.id(), self.index) == (id.unit, id.index)
    }

    pub(crate) fn is_trainable(&self) -> bool {
        self.unit.role(self.index) == Role::Trainable
    }
}

/// A use of a unit as one op. Its backward runs the forward again.
pub(crate) struct RecomputeOp {
    pub(crate) own: Arc<LiveUnit>,
    pub(crate) forward: RepeatableForward,
    pub(crate) usage: Arc<UnitUsage>,
    pub(crate) inputs: Vec<RecomputedInput>,
    pub(crate) reads: Vec<RecomputedRead>,
    /// Buffers as the first run has read them, in the order of its reads.
    pub(crate) buffers: Vec<(BufferId, Tensor)>,
    /// Sums of statistics that the first run has seen.
    pub(crate) statistics: Vec<Arc<RecordedSums>>,
    pub(crate) output: RecomputedOutput,
}

impl RecomputeOp {
    /// Applies the op to the chain of its inputs. Returns a copy of the output of the first run.
    pub(crate) fn apply(self, chain: &Tensor, output: &Tensor) -> Result<Tensor> {
        let RecomputedOutput::Viewed { cell, output: place } = &self.output else {
            return chain.apply_op1(self);
        };
        let (cell, place) = (Arc::clone(cell), Arc::clone(place));
        let output = viewed(chain.apply_op1(self)?, cell, copied(output)?, output.shape().clone())?;
        let _ = place.set(plain(&output));
        Ok(output)
    }

    /// Runs the forward again and its backward, and delivers the gradients of the parameters and of
    /// the inputs. `op` is the result of this op in candle's graph, and `output` the first output.
    fn rerun(&self, op: TensorId, output: &Tensor, gradient: GradientSum) -> Result<()> {
        let _span = tracing::trace_span!("recompute", unit = self.own.id().index()).entered();
        let variables = self.inputs.iter().map(|input| RunVariable::of_input(&input.tensor));
        let variables = variables.collect::<Result<Vec<_>>>()?;
        let leaves: Vec<_> = variables.iter().map(|it| it.tensor.clone()).collect();
        let run = SecondRun::of(self);
        let mut gradients = {
            let again = (self.forward)(&run, &leaves)?;
            if !are_same_bits(&again, output)? {
                let how = "its second output differs from its first, as with a dropout that draws a \
                           new seed";
                Err(self.not_repeatable(how.to_owned()))?;
            }
            if run.reaches_others(&again, &variables) {
                let how = "its second run depends on a tensor with a history that this run did not \
                           make, as a cache of a value computed from parameters, whose gradients \
                           would be lost";
                Err(self.not_repeatable(how.to_owned()))?;
            }
            match Node::known(&again) {
                Some(node) => {
                    node.cell.add(gradient)?;
                    node.scalar.backward()?
                }
                None => {
                    let seed = gradient.into_tensor_like(&again)?;
                    again.apply_op1(IdentityOp::Seed(seed))?.backward()?
                }
            }
        };
        run.deliver(op, &mut gradients)?;
        for (input, variable) in self.inputs.iter().zip(&variables) {
            if let Some(gradient) = variable.gradient(&mut gradients) {
                input.set_gradient(gradient)?;
            }
        }
        Ok(())
    }

    fn not_repeatable(&self, how: String) -> Error {
        Error::LostGradients(LostGradients::NotRepeatable { unit: self.own.name().to_owned(), how })
    }
}

impl CustomOp1 for RecomputeOp {
    fn name(&self) -> &'static str {
        "recomputed unit"
    }

    fn cpu_fwd(&self, chain: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        if let RecomputedOutput::Viewed { .. } = self.output {
            return copy(chain, layout);
        }
        let output = self.output.take()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cpu(storage) => copy(storage, layout),
            _ => bail!("the output of a recomputed unit is on another device than its pass"),
        }
    }

    #[cfg(feature = "candle-cuda")]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let output = self.output.take()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => crate::cuda::copy(storage, layout),
            _ => bail!("the output of a recomputed unit is on another device than its pass"),
        }
    }

    fn bwd(&self, inputs: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.usage.gather()?;
        match &self.output {
            RecomputedOutput::OfOp(_) => {
                self.rerun(result.id(), result, GradientSum::Tensor(gradient.detach()))?;
            }
            RecomputedOutput::Viewed { cell, output } => {
                let output = output.get().expect("`apply` sets the output");
                let zeros = || GradientSum::Host(Gradient::zeros(output.elem_count()));
                // Without a gradient, only the order of the backward has led here.
                let gradient = cell.take(gradient)?.unwrap_or_else(zeros);
                self.rerun(result.id(), output, gradient)?;
            }
        }
        self.usage.release()?;
        zeros::for_parent(inputs)
    }
}

/// Provides the second run with its parameters. Each trainable one is a variable that holds the
/// storage of a parameter during the run.
struct SecondRun<'a> {
    op: &'a RecomputeOp,
    /// Variables, and the tensors that get their storages back, by the parameter's index in
    /// `reads`.
    leaves: Mutex<BTreeMap<usize, (RunVariable, Tensor)>>,
    /// Number of reads of buffers so far.
    buffers_read: AtomicUsize,
}

impl<'a> SecondRun<'a> {
    fn of(op: &'a RecomputeOp) -> Self {
        Self { op, leaves: Mutex::default(), buffers_read: AtomicUsize::new(0) }
    }

    fn read(&self, name: &str) -> Result<Tensor> {
        let known = self.spec().find(name).and_then(|id| {
            let (place, read) = self.op.reads.iter().enumerate().find(|(_, it)| it.is(id))?;
            Some((place, read, read.unit.taken(read.index)?))
        });
        let Some((place, read, tensor)) = known else {
            let how = format!("its second run reads parameter {name}, and its first did not");
            return Err(self.op.not_repeatable(how).into());
        };
        if !read.is_trainable() {
            return Ok(tensor);
        }
        let mut leaves = self.leaves.lock();
        if let Some((leaf, _)) = leaves.get(&place) {
            return Ok(leaf.tensor.clone());
        }
        let leaf = RunVariable::new(take_storage(&tensor)?, &tensor)?;
        let read = leaf.tensor.clone();
        leaves.insert(place, (leaf, tensor));
        Ok(read)
    }

    /// Returns whether the output depends on variables that are neither parameters in this run nor
    /// its inputs.
    fn reaches_others(&self, output: &Tensor, inputs: &[RunVariable]) -> bool {
        let leaves = self.leaves.lock();
        let known = inputs.iter().chain(leaves.values().map(|(leaf, _)| leaf));
        let known: Vec<_> = known.map(|it| it.variable.id()).collect();
        let is_known = |variable: &Tensor| known.contains(&variable.id());
        let Reached { anchors, programs, .. } = Reached::from(output);
        !anchors.is_empty() || !programs.iter().all(is_known)
    }

    /// Returns the storages to their tensors, and then passes the gradients to the units. The last
    /// one frees the unit. `op` is the result of the recomputed unit in candle's graph.
    fn deliver(self, op: TensorId, gradients: &mut GradStore) -> Result<()> {
        let leaves = self.leaves.into_inner();
        leaves.values().try_for_each(|(leaf, tensor)| move_back(&leaf.tensor, tensor))?;
        for (place, read) in self.op.reads.iter().enumerate() {
            if read.is_trainable() {
                let piece = leaves.get(&place).and_then(|(leaf, _)| leaf.gradient(gradients));
                let piece = match piece {
                    Some(piece) if zeros::counts(op, &piece)? => Some(piece),
                    _ => None,
                };
                read.unit.accept(read.index, piece)?;
            }
        }
        self.op.statistics.iter().try_for_each(|sums| sums.end_backward())
    }

    /// Returns a buffer as the first run has read it.
    fn read_buffer(&self, name: &str) -> Result<Tensor> {
        let id = self.spec().find_buffer(name);
        let index = self.buffers_read.fetch_add(1, Ordering::Relaxed);
        match self.op.buffers.get(index) {
            Some((read, buffer)) if Some(*read) == id => Ok(buffer.clone()),
            _ => {
                let how = format!("its second run reads buffer {name} where its first did not");
                Err(self.op.not_repeatable(how).into())
            }
        }
    }
}

impl Parameters for SecondRun<'_> {
    fn get(&self, name: &str) -> Result<Tensor> {
        self.read(name)
    }

    fn buffer(&self, name: &str) -> Result<Tensor> {
        self.read_buffer(name)
    }

    fn write_buffer(&self, _: &str, _: &Tensor) -> Result<()> {
        Ok(())
    }

    fn mode(&self) -> Result<ForwardMode> {
        Ok(self.op.own.kind().into())
    }

    fn statistics(&self, name: &str) -> Option<BatchStatistics> {
        let (unit, index) = statistics::declared(self.spec(), name)?;
        let recorded = self.op.statistics.iter().find(|sums| sums.is(unit, index))?;
        Some(BatchStatistics::second(Arc::clone(recorded)))
    }

    fn spec(&self) -> &ModelSpec {
        self.op.own.spec()
    }

    fn dtype(&self) -> DType {
        self.op.own.dtype()
    }

    fn device(&self) -> &Device {
        self.op.own.device()
    }
}

/// Returns whether two tensors have the same shape, dtype and bits. Tensors on a GPU are copied to
/// the host.
fn are_same_bits(left: &Tensor, right: &Tensor) -> Result<bool> {
    if left.dims() != right.dims() || left.dtype() != right.dtype() {
        return Ok(false);
    }
    let on_host = |tensor: &Tensor| tensor.detach().contiguous()?.to_device(&Device::Cpu);
    let left = on_host(left)?;
    let right = on_host(right)?;
    let left = left.storage_and_layout();
    let right = right.storage_and_layout();
    let range = |layout: &Layout| {
        let start = layout.start_offset();
        start..start + layout.shape().elem_count()
    };
    let of_left = range(left.1);
    let of_right = range(right.1);
    Ok(match (&*left.0, &*right.0) {
        (Storage::Cpu(CpuStorage::F32(left)), Storage::Cpu(CpuStorage::F32(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        (Storage::Cpu(CpuStorage::F64(left)), Storage::Cpu(CpuStorage::F64(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        (Storage::Cpu(CpuStorage::BF16(left)), Storage::Cpu(CpuStorage::BF16(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        (Storage::Cpu(CpuStorage::F16(left)), Storage::Cpu(CpuStorage::F16(right))) => {
            same(&left[of_left], &right[of_right], |value| value.to_bits())
        }
        _ => false,
    })
}

fn same<T, B: PartialEq>(left: &[T], right: &[T], bits: impl Fn(&T) -> B) -> bool {
    left.len() == right.len()
        && left.iter().zip(right).all(|(left, right)| bits(left) == bits(right))
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn of(values: &[f32], dtype: DType) -> Tensor {
        Tensor::new(values, &Device::Cpu).and_then(|it| it.to_dtype(dtype)).expect("a float")
    }

    #[test]
    fn each_bit_counts_in_each_dtype() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let same = |left: &[f32], right: &[f32]| {
                are_same_bits(&of(left, dtype), &of(right, dtype)).expect("on the host")
            };
            assert!(same(&[1.0, f32::NAN], &[1.0, f32::NAN]));
            assert!(!same(&[0.0], &[-0.0]), "{dtype:?}");
            assert!(!same(&[1.0], &[1.0, 1.0]), "{dtype:?}");
        }
        let mixed = are_same_bits(&of(&[1.0], DType::F32), &of(&[1.0], DType::F64));
        assert!(!mixed.expect("on the host"));
    }

    #[test]
    fn views_are_compared_by_their_elements() {
        let rows = Tensor::new(&[[1_f32, 2.0], [3.0, 4.0]], &Device::Cpu).expect("2 x 2");
        let column = rows.t().and_then(|it| it.narrow(0, 1, 1)).expect("a column");
        let want = Tensor::new(&[[2_f32, 4.0]], &Device::Cpu).expect("a row");
        assert!(are_same_bits(&column, &want).expect("on the host"));
        assert!(!are_same_bits(&rows.narrow(0, 1, 1).expect("a row"), &want).expect("on the host"));
    }
}
