//! Variables that a loss depends on: hsdp's own, which start graphs, and those of the program.

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, TensorId, Var};
use parking_lot::Mutex;

use crate::convert::is_in_16_bits;
use crate::error::{Error, LostGradients, listed};

/// The purpose for which hsdp makes a variable. Such a variable's gradient is not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VariablePurpose {
    /// First parent of the parameters of a pass.
    Parameters,
    /// Start of the chain of collectives of a tape.
    Collectives,
}

impl VariablePurpose {
    const ALL: [Self; 2] = [Self::Parameters, Self::Collectives];

    /// Returns the bits of a NaN in f32. candle shows neither the op of a tensor nor an owner, so
    /// variables of hsdp are recognized by this value, which no arithmetic produces.
    fn bits(self) -> u32 {
        match self {
            Self::Parameters => 0x7fd5_3d01,
            Self::Collectives => 0x7fd5_3d02,
        }
    }

    /// Makes a scalar variable with this purpose.
    pub(crate) fn variable(self, device: &Device) -> Result<Var> {
        Var::from_tensor(&Tensor::from_vec(vec![f32::from_bits(self.bits())], (), device)?)
    }

    /// Returns the purpose of a variable that hsdp has made. `None` for a variable of the program.
    fn of(variable: &Tensor) -> Option<Self> {
        if variable.dtype() != DType::F32 || !variable.dims().is_empty() {
            return None;
        }
        let bits = variable.to_scalar::<f32>().ok()?.to_bits();
        Self::ALL.into_iter().find(|purpose| purpose.bits() == bits)
    }
}

/// Variables that get gradients in the backward of a tensor, and the parents that lead to them.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    /// First parents of parameters, one for each pass.
    pub(crate) anchors: Vec<Tensor>,
    /// Whether the backward reaches a collective of a tape.
    pub(crate) collectives: bool,
    /// Variables of the program.
    pub(crate) programs: Vec<Tensor>,
    /// A 16-bit dtype of a tensor on the way, which rounds gradients.
    pub(crate) rounds_to: Option<DType>,
    /// All tensors on the way, and the variables.
    nodes: HashSet<TensorId>,
}

impl Reached {
    /// Finds the variables that a backward from `tensor` reaches. Variables of integers have no
    /// gradient.
    pub(crate) fn from(tensor: &Tensor) -> Self {
        let mut reached = Self::default();
        for node in tensor.sorted_nodes() {
            reached.nodes.insert(node.id());
            if is_in_16_bits(node.dtype()) {
                reached.rounds_to = Some(node.dtype());
            }
            if !node.is_variable() || node.dtype().is_int() {
                continue;
            }
            match VariablePurpose::of(node) {
                Some(VariablePurpose::Parameters) => reached.anchors.push(node.clone()),
                Some(VariablePurpose::Collectives) => reached.collectives = true,
                None => reached.programs.push(node.clone()),
            }
        }
        reached
    }

    /// Returns whether the backward reaches a tensor.
    pub(crate) fn has(&self, tensor: TensorId) -> bool {
        self.nodes.contains(&tensor)
    }

    /// Describes the variables. `None` if the backward reaches none.
    pub(crate) fn described(&self) -> Option<String> {
        let parameters = "tensors computed from the parameters of a pass".to_owned();
        let programs = || format!("variables of the program ({})", described(self.programs.iter()));
        let parts = [
            (!self.anchors.is_empty()).then_some(parameters),
            (!self.programs.is_empty()).then(programs),
            self.collectives.then(|| "collectives of a tape".to_owned()),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| parts.join(" and "))
    }
}

/// Describes variables of the program by shapes and dtypes, up to the first eight.
fn described<'a>(variables: impl ExactSizeIterator<Item = &'a Tensor>) -> String {
    listed(variables.map(|it| format!("{:?} of {}", it.dims(), it.dtype().as_str())))
}

/// Gradient of a variable of the program, available when the backward of its pass is over. See
/// [`Pass::gradient_of`](crate::Pass::gradient_of).
#[derive(Clone, Debug)]
pub struct VariableGradient(Arc<Mutex<Option<Tensor>>>);

impl VariableGradient {
    /// Returns the gradient of this rank's `loss`, the tensor that was given to the backward, with
    /// respect to the variable, in the variable's shape and dtype. It has no factor of the loss
    /// scale or of the weight, and it is not reduced over ranks. Not collective.
    ///
    /// Returns `None` before the backward is over, if it failed, and if the loss does not depend on
    /// the variable. Returns zeros if the loss is a mean over items of weight 0.
    #[must_use]
    pub fn get(&self) -> Option<Tensor> {
        self.0.lock().clone()
    }
}

/// Variables of the program whose gradients it has asked for.
#[derive(Debug, Default)]
pub(crate) struct WantedGradients(Mutex<Vec<(Tensor, VariableGradient)>>);

impl WantedGradients {
    /// Records that the program asks for the gradient of `variable`.
    pub(crate) fn add(&self, variable: &Var) -> VariableGradient {
        let gradient = VariableGradient(Arc::default());
        self.0.lock().push((variable.as_tensor().clone(), gradient.clone()));
        gradient
    }

    /// Refuses variables of the program that a loss depends on, and whose gradients would be lost.
    ///
    /// # Errors
    /// [`LostGradients::Undeclared`](crate::LostGradients::Undeclared).
    pub(crate) fn check(&self, reached: &Reached) -> std::result::Result<(), Error> {
        let wanted = self.0.lock();
        let is_wanted = |id| wanted.iter().any(|(variable, _)| variable.id() == id);
        let lost: Vec<_> = reached.programs.iter().filter(|it| !is_wanted(it.id())).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let variables = described(lost.iter().copied());
        Err(Error::LostGradients(LostGradients::Undeclared { count: lost.len(), variables }))
    }

    /// Passes the requested gradients to the program, if the backward reached their variables.
    pub(crate) fn deliver(
        &self,
        reached: &Reached,
        gradient_of: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        for (variable, slot) in &*self.0.lock() {
            if reached.programs.iter().any(|it| it.id() == variable.id()) {
                *slot.0.lock() = Some(gradient_of(variable)?.detach());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_hsdp_are_told_from_those_of_the_program() {
        let cpu = &Device::Cpu;
        for purpose in VariablePurpose::ALL {
            let variable = purpose.variable(cpu).expect("a scalar");
            assert_eq!(VariablePurpose::of(&variable), Some(purpose));
        }
        for value in [0.0, 1.0, f32::NAN, -f32::NAN, f32::INFINITY] {
            let variable = Var::new(value, cpu).expect("a scalar");
            assert_eq!(VariablePurpose::of(&variable), None);
        }
    }

    #[test]
    fn what_has_no_gradient_is_not_reached() {
        let cpu = &Device::Cpu;
        let anchor = VariablePurpose::Parameters.variable(cpu).expect("a scalar");
        let link = VariablePurpose::Collectives.variable(cpu).expect("a scalar");
        let one = Var::new(1_f32, cpu).expect("one");
        let cut = Var::new(2_f32, cpu).expect("two");
        let rows = Var::new(&[1_u32, 0], cpu).expect("two rows");
        let table = Var::new(&[1_f32, 2.0], cpu).expect("two elements");
        let sum = [
            (anchor.as_tensor() * 1.0).expect("a product"),
            (link.as_tensor() * 1.0).expect("a product"),
            (one.as_tensor() * cut.detach()).expect("a product"),
            (cut.as_tensor() * 0.0).expect("a product"),
            table.index_select(&rows, 0).and_then(|it| it.sum_all()).expect("a sum"),
        ];
        let sum = Tensor::stack(&sum, 0).and_then(|it| it.sum_all()).expect("a sum");
        let reached = Reached::from(&sum);
        let ids = |tensors: &[Tensor]| tensors.iter().map(Tensor::id).collect::<Vec<_>>();
        assert_eq!(ids(&reached.anchors), [anchor.id()]);
        assert!(reached.collectives);
        let mut programs = ids(&reached.programs);
        programs.sort_by_key(|id| *id != one.id());
        assert_eq!(programs, [one.id(), table.id()]);
    }

    #[test]
    fn a_variable_is_described_by_shape_and_dtype() {
        let one = Tensor::new(&[1_f32], &Device::Cpu).expect("one");
        assert_eq!(described([&one, &one].into_iter()), "[1] of f32, [1] of f32");
    }
}
