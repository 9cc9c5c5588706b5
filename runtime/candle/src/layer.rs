//! Layers whose gradients are summed in place, in f32.
//!
//! candle's backward adds each gradient that an op returns to a tensor of zeros, and makes a new
//! tensor of the sum, in the dtype of the forward. A layer that [`record`] puts into the graph does
//! without that: a scalar represents its output there, and the gradient of the output lies beside
//! the graph, in a cell.
//!
//! ```text
//!   candle's graph            x ---> gate --> layer --> layer -------> gate ...
//!                                              |          |
//!   tensors of the program                    view       view
//! ```
//!
//! * A layer is an op on the scalars of its inputs. Its backward takes the gradient of the
//!   output from the cell, and adds the gradients of the inputs to their cells.
//! * The program has a view of the scalar, a tensor with the elements. If an op of candle reads the
//!   view, its backward adds candle's gradient to the cell.
//! * A tensor that candle's ops have made becomes the input of a layer through a gate, whose
//!   backward gives the sum of the cell to candle.
//!
//! The scalars have the edges of the graph, so candle comes to a scalar after all its readers, and
//! a cell is complete when the backward takes it. Sums are in the order of candle's walk. The
//! gradient that candle computes for a scalar is the number of gradients in the cell; a sum with
//! gradients of another backward is refused.
//!
//! A layer finds the scalar of an input by the address of the storage: a reshape of an output
//! shares it, and has the same elements in the same order.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, OnceLock, Weak};

use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor,
    bail,
};
use parking_lot::Mutex;

use crate::gradient::{Gradient, GradientCell, GradientSum};
use crate::storage::copy;
use crate::zeros;

/// Backward of a layer on the CPU.
pub trait Layer: Send + Sync + 'static {
    /// Returns the name of the layer, for errors.
    fn name(&self) -> &'static str;

    /// Computes the gradients of the inputs from the gradient of the output, one entry for each
    /// input. A tracked input needs a gradient, of as many elements as it has.
    ///
    /// # Errors
    /// The errors of the layer's arithmetic. The backward fails with them.
    fn backward(
        &self,
        inputs: &[LayerArgument],
        gradient: &Gradient,
    ) -> Result<Vec<Option<Gradient>>>;
}

/// An input of a [`Layer`], in its backward.
#[derive(Debug)]
pub struct LayerArgument {
    /// Tensor without a history.
    pub tensor: Tensor,
    /// Whether a gradient flows to the input.
    pub is_tracked: bool,
}

/// Makes the output of a layer from its elements, and puts the layer into candle's graph if candle
/// tracks an input. The inputs are on the CPU, contiguous, of the dtype f32, bf16 or f16. Not
/// collective.
///
/// # Errors
/// If an input is on another device, of another dtype or not contiguous, or the output is of
/// another dtype or has another number of elements than its shape.
///
/// # Examples
/// ```
/// use candle_core::{CpuStorage, Device, Result, Tensor, Var};
/// use hsdp_candle::Gradient;
/// use hsdp_candle::layer::{Layer, LayerArgument, record};
///
/// /// Squares of an input in f32.
/// struct Square;
///
/// impl Layer for Square {
///     fn name(&self) -> &'static str {
///         "square"
///     }
///
///     fn backward(&self, x: &[LayerArgument], g: &Gradient) -> Result<Vec<Option<Gradient>>> {
///         let x = x[0].tensor.flatten_all()?.to_vec1::<f32>()?;
///         let of_x: Vec<f32> = x.iter().zip(g.elements()).map(|(x, g)| 2.0 * x * g).collect();
///         Ok(vec![Some(of_x.into())])
///     }
/// }
///
/// fn square(x: &Tensor) -> Result<Tensor> {
///     let x = x.contiguous()?;
///     let squares = x.flatten_all()?.to_vec1::<f32>()?.iter().map(|x| x * x).collect();
///     record(Square, &[&x], CpuStorage::F32(squares), x.shape().clone())
/// }
///
/// let x = Var::new(&[3_f32, -1.0], &Device::Cpu)?;
/// let gradients = square(&square(&x)?)?.sum_all()?.backward()?;
/// assert_eq!(gradients.get(&x).expect("x is a variable").to_vec1::<f32>()?, [108.0, -4.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn record(
    layer: impl Layer,
    inputs: &[&Tensor],
    elements: CpuStorage,
    shape: Shape,
) -> Result<Tensor> {
    check(layer.name(), inputs, &elements, &shape)?;
    let nodes = inputs.iter().map(|input| input.track_op().then(|| Node::of(input)).transpose());
    let nodes = nodes.collect::<Result<Vec<_>>>()?;
    if nodes.iter().all(Option::is_none) {
        return Ok(Tensor::from_storage(Storage::Cpu(elements), shape, BackpropOp::none(), false));
    }
    let argument = |(input, node): (&&Tensor, &Option<Arc<Node>>)| LayerArgument {
        tensor: node.as_ref().map_or_else(|| input.detach(), |node| node.plain(input)),
        is_tracked: node.is_some(),
    };
    let arguments = inputs.iter().zip(&nodes).map(argument).collect();
    let cell = Arc::<GradientCell>::default();
    let scalars: Vec<_> = nodes.iter().flatten().map(|node| node.scalar.clone()).collect();
    let len = shape.elem_count();
    let op = LayerOp { layer, arguments, nodes, len, cell: Arc::clone(&cell) };
    let scalar = match scalars.as_slice() {
        [parent] => parent.apply_op1(op)?,
        [first, second] => first.apply_op2(second, op)?,
        [first, before @ .., second, third] => {
            let join = |joined: Tensor, scalar| joined.apply_op2(scalar, JoinOp);
            before.iter().try_fold(first.clone(), join)?.apply_op3(second, third, op)?
        }
        [] => bail!("{}: a layer without inputs", op.layer.name()),
    };
    viewed(scalar, cell, Storage::Cpu(elements), shape)
}

/// Refuses inputs and an output that a layer cannot have.
fn check(
    layer: &'static str,
    inputs: &[&Tensor],
    elements: &CpuStorage,
    shape: &Shape,
) -> Result<()> {
    for input in inputs {
        let dtype = input.dtype().as_str();
        if !can_be_node(input) {
            let device = input.device().location();
            bail!("{layer}: an input is {dtype} on {device:?}, not f32, bf16 or f16 on the CPU")
        }
        if !input.is_contiguous() {
            bail!("{layer}: an input is not contiguous, {:?}", input.layout())
        }
    }
    let len = match elements {
        CpuStorage::F32(values) => values.len(),
        CpuStorage::BF16(values) => values.len(),
        CpuStorage::F16(values) => values.len(),
        _ => bail!("{layer}: the output is neither f32 nor bf16 nor f16"),
    };
    if len != shape.elem_count() {
        bail!("{layer}: the output has {len} elements, and its shape is {shape:?}")
    }
    Ok(())
}

/// A tensor that a scalar represents in candle's graph.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) scalar: Tensor,
    pub(crate) cell: Arc<GradientCell>,
    /// Tensor without a history, which keeps the address of its storage from being used again.
    tensor: Tensor,
}

/// Nodes by the addresses of their storages. A node removes itself.
static NODES: Mutex<BTreeMap<usize, Weak<Node>>> = Mutex::new(BTreeMap::new());

/// Returns whether the elements of a tensor are in order from the start of the storage on.
fn starts_whole(tensor: &Tensor) -> bool {
    tensor.is_contiguous() && tensor.layout().start_offset() == 0
}

/// Returns the number of elements of a storage that a node may have.
fn storage_len(tensor: &Tensor) -> Option<usize> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(values)) => Some(values.len()),
        Storage::Cpu(CpuStorage::BF16(values)) => Some(values.len()),
        Storage::Cpu(CpuStorage::F16(values)) => Some(values.len()),
        _ => None,
    }
}

fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    std::ptr::from_ref::<Storage>(&storage).addr()
}

impl Node {
    /// Makes the node of a tensor. Layers find it if the tensor is its whole storage.
    fn new(scalar: Tensor, cell: Arc<GradientCell>, tensor: &Tensor) -> Arc<Self> {
        let node = Arc::new(Self { scalar, cell, tensor: tensor.detach() });
        if starts_whole(tensor) && storage_len(tensor) == Some(tensor.elem_count()) {
            NODES.lock().insert(address(tensor), Arc::downgrade(&node));
        }
        node
    }

    /// Returns the node of a tensor that candle tracks, if it has one.
    pub(crate) fn known(tensor: &Tensor) -> Option<Arc<Self>> {
        if !tensor.track_op() || !starts_whole(tensor) {
            return None;
        }
        let address = address(tensor);
        let node = NODES.lock().get(&address)?.upgrade()?;
        (tensor.elem_count() == node.tensor.elem_count()).then_some(node)
    }

    /// Returns `tensor`, which this node represents, without a history.
    pub(crate) fn plain(&self, tensor: &Tensor) -> Tensor {
        match self.tensor.dims() == tensor.dims() {
            true => self.tensor.clone(),
            false => tensor.detach(),
        }
    }

    /// Returns the node of a tensor that candle tracks, or makes a gate.
    fn of(tensor: &Tensor) -> Result<Arc<Self>> {
        if let Some(node) = Self::known(tensor) {
            return Ok(node);
        }
        let cell = Arc::<GradientCell>::default();
        let scalar = tensor.apply_op1(GateOp(Arc::clone(&cell)))?;
        Ok(Self::new(scalar, cell, tensor))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let address = address(&self.tensor);
        if let Entry::Occupied(entry) = NODES.lock().entry(address)
            && std::ptr::eq(entry.get().as_ptr(), self)
        {
            entry.remove();
        }
    }
}

/// Returns whether a scalar can represent a tensor of this dtype and device.
pub(crate) fn can_be_node(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16)
}

/// Returns the tensor that stands in candle's graph for `tensor`: its scalar, or if it has none,
/// itself.
pub(crate) fn in_graph(tensor: &Tensor) -> Tensor {
    Node::known(tensor).map_or_else(|| tensor.clone(), |node| node.scalar.clone())
}

/// Returns a tensor without a history that shares the storage of `tensor`.
pub(crate) fn plain(tensor: &Tensor) -> Tensor {
    Node::known(tensor).map_or_else(|| tensor.detach(), |node| node.plain(tensor))
}

/// Applies an op to a tensor in candle's graph, that is, to its scalar if it has one. `op` returns
/// its argument, and gives it the whole gradient.
pub(crate) fn through(
    tensor: &Tensor,
    op: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(node) = Node::known(tensor) else { return op(tensor) };
    let elements = copied(tensor)?;
    viewed(op(&node.scalar)?, Arc::clone(&node.cell), elements, tensor.shape().clone())
}

/// Copies the elements of a contiguous tensor on the CPU.
pub(crate) fn copied(tensor: &Tensor) -> Result<Storage> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(Storage::Cpu(copy(storage, layout)?.0)),
        _ => bail!("a tensor that layers read is not on the CPU"),
    }
}

/// Makes the tensor that `scalar` represents. The gradient of the tensor arrives in `cell`.
pub(crate) fn viewed(
    scalar: Tensor,
    cell: Arc<GradientCell>,
    elements: Storage,
    shape: Shape,
) -> Result<Tensor> {
    let node = Arc::<OnceLock<_>>::default();
    let elements = Mutex::new(Some((elements, shape)));
    let op = ViewOp { elements, node: Arc::clone(&node) };
    let view = scalar.apply_op1(op)?;
    let _ = node.set(Node::new(scalar, cell, &view));
    Ok(view)
}

/// Returns the storage of a scalar of candle's graph. Its value has no meaning.
fn scalar() -> (CpuStorage, Shape) {
    (CpuStorage::F32(vec![0.0]), ().into())
}

/// Op of a layer, on the scalars of its inputs.
struct LayerOp<L> {
    layer: L,
    arguments: Vec<LayerArgument>,
    nodes: Vec<Option<Arc<Node>>>,
    /// Number of elements of the output.
    len: usize,
    cell: Arc<GradientCell>,
}

impl<L: Layer> LayerOp<L> {
    fn backward(&self, count: &Tensor) -> Result<()> {
        let gradient = match self.cell.take(count)? {
            Some(gradient) => gradient.into_gradient()?,
            // Only the order of the backward has led here.
            None => Gradient::zeros(self.len),
        };
        let gradients = self.layer.backward(&self.arguments, &gradient)?;
        drop(gradient);
        let name = self.layer.name();
        if gradients.len() != self.arguments.len() {
            let got = gradients.len();
            let want = self.arguments.len();
            bail!("{name}: the backward returned {got} gradients for {want} inputs")
        }
        for (place, (node, gradient)) in self.nodes.iter().zip(gradients).enumerate() {
            let Some(node) = node else { continue };
            let want = node.tensor.elem_count();
            match gradient {
                Some(gradient) if gradient.elements().len() == want => {
                    node.cell.add(GradientSum::Host(gradient))?;
                }
                Some(gradient) => bail!(
                    "{name}: the gradient of input {place} has {} elements, and the input {want}",
                    gradient.elements().len()
                ),
                None => bail!("{name}: the backward returned no gradient for input {place}"),
            }
        }
        Ok(())
    }
}

/// Implements candle's trait of ops for layers with this number of tracked inputs.
macro_rules! layer_op {
    ($op:ident, $gradients:ty, $($parent:ident: $storage:ty, $layout:ty),+) => {
        impl<L: Layer> $op for LayerOp<L> {
            fn name(&self) -> &'static str {
                self.layer.name()
            }

            fn cpu_fwd(&self, $(_: $storage, _: $layout),+) -> Result<(CpuStorage, Shape)> {
                Ok(scalar())
            }

            fn bwd(&self, $($parent: &Tensor,)+ _: &Tensor, count: &Tensor) -> Result<$gradients> {
                self.backward(count)?;
                let gradients = ($(GradientCell::one($parent)?),+);
                Ok(gradients)
            }
        }
    };
}

type ParentGradient = Option<Tensor>;

layer_op!(CustomOp1, ParentGradient, a: &CpuStorage, &Layout);
layer_op!(
    CustomOp2, (ParentGradient, ParentGradient),
    a: &CpuStorage, &Layout, b: &CpuStorage, &Layout
);
layer_op!(
    CustomOp3, (ParentGradient, ParentGradient, ParentGradient),
    a: &CpuStorage, &Layout, b: &CpuStorage, &Layout, c: &CpuStorage, &Layout
);

/// Op that makes a tensor with elements from the scalar that represents it.
struct ViewOp {
    elements: Mutex<Option<(Storage, Shape)>>,
    /// Node of the view. The view alone keeps it while no layer reads it.
    node: Arc<OnceLock<Arc<Node>>>,
}

impl CustomOp1 for ViewOp {
    fn name(&self) -> &'static str {
        "elements of a layer"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.elements.lock().take() {
            Some((Storage::Cpu(elements), shape)) => Ok((elements, shape)),
            _ => bail!("the elements of a layer were taken twice, or are not on the CPU"),
        }
    }

    fn bwd(&self, scalar: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let node = self.node.get().expect("`viewed` sets the node before it returns the view");
        node.cell.add(GradientSum::Tensor(gradient.detach()))?;
        GradientCell::one(scalar)
    }
}

/// Op that makes the scalar of a tensor of candle's.
struct GateOp(Arc<GradientCell>);

impl CustomOp1 for GateOp {
    fn name(&self) -> &'static str {
        "input of a layer"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok(scalar())
    }

    fn bwd(&self, tensor: &Tensor, _: &Tensor, count: &Tensor) -> Result<Option<Tensor>> {
        match self.0.take(count)? {
            Some(gradient) => Ok(Some(gradient.into_tensor_like(tensor)?)),
            None => zeros::for_parent(tensor),
        }
    }
}

/// Op that joins the scalars of two inputs, for a layer with more than three.
struct JoinOp;

impl CustomOp2 for JoinOp {
    fn name(&self) -> &'static str {
        "inputs of a layer"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok(scalar())
    }

    fn bwd(
        &self,
        first: &Tensor,
        second: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((GradientCell::one(first)?, GradientCell::one(second)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// Layer that returns its input, twice as large.
    struct Twice;

    impl Layer for Twice {
        fn name(&self) -> &'static str {
            "twice"
        }

        fn backward(
            &self,
            _: &[LayerArgument],
            gradient: &Gradient,
        ) -> Result<Vec<Option<Gradient>>> {
            let doubled: Vec<f32> = gradient.elements().iter().map(|it| 2.0 * it).collect();
            Ok(vec![Some(doubled.into())])
        }
    }

    fn twice(x: &Tensor) -> Tensor {
        let doubled = (x.detach() * 2.0).and_then(|it| it.flatten_all()).expect("a product");
        let elements = CpuStorage::F32(doubled.to_vec1().expect("f32"));
        record(Twice, &[x], elements, x.shape().clone()).expect("a layer")
    }

    fn variable() -> Var {
        Var::new(&[[1_f32, 2.0], [3.0, 4.0]], &Device::Cpu).expect("a variable")
    }

    #[test]
    fn a_node_lives_as_long_as_the_graph() {
        let x = variable();
        assert!(Node::known(&x).is_none());
        let y = twice(&x);
        let address = address(&y);
        let node = Node::known(&y).expect("the output of a layer");
        let reshaped = y.reshape(4).expect("4 elements");
        assert!(Arc::ptr_eq(&node, &Node::known(&reshaped).expect("the same storage")));
        assert!(Node::known(&y.narrow(0, 0, 1).expect("a row")).is_none(), "a part");
        assert!(Node::known(&y.t().expect("two dims")).is_none(), "another order");
        assert!(Node::known(&y.detach()).is_none(), "no history");
        drop((y, node, reshaped));
        assert!(!NODES.lock().contains_key(&address));
        assert!(Node::known(&x).is_none(), "the gate is gone");
    }

    #[test]
    fn parts_have_no_nodes_that_layers_find() {
        let x = variable();
        let rows = [1, 0].map(|row| x.get(row).expect("a row"));
        let outputs = rows.each_ref().map(twice);
        assert!(rows.iter().all(|row| Node::known(row).is_none()));
        assert!(Node::known(&x).is_none());
        let y = twice(&x);
        assert!(Node::known(&x).is_some_and(|node| node.tensor.dims() == [2, 2]));
        drop((y, outputs));
    }

    #[test]
    fn what_a_layer_cannot_have_is_refused() {
        let x = variable();
        let refused = |input: &Tensor, elements: CpuStorage, shape: Shape| {
            let error = record(Twice, &[input], elements, shape).expect_err("refused");
            error.to_string()
        };
        let four = || CpuStorage::F32(vec![0.0; 4]);
        let transposed = x.t().expect("two dims");
        let error = refused(&transposed, four(), (2, 2).into());
        assert!(error.starts_with("twice: an input is not contiguous"), "{error}");
        let error = refused(&x, four(), 3.into());
        assert!(error.starts_with("twice: the output has 4 elements, and its shape is"), "{error}");
        let error = refused(&x, CpuStorage::F64(vec![0.0; 4]), (2, 2).into());
        assert!(error.starts_with("twice: the output is neither f32 nor"), "{error}");
    }
}
