//! The adapter's error, and its conversion to candle's error and back.

use std::fmt::Display;
use std::io;

use candle_core::{DType, DeviceLocation, Error as CandleError};
use hsdp_sharding::Unit;

/// An error of the adapter, of the runtime below it, or of candle.
///
/// Custom ops can only return candle's errors. An error of this type is wrapped whole in a candle
/// error and unwrapped again: `?` converts in both directions, and the runtime's error stays typed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The runtime failed: a collective failed, a step ended early, or a call came out of turn.
    // Displayed rather than transparent, so that a caller that knows no candle finds the runtime's
    // error as the source.
    #[error("{0}")]
    Runtime(#[from] hsdp::Error),
    /// candle failed. An error of a unit's forward is a [`Context`](CandleError::Context) with the
    /// name of the unit.
    #[error("{}", in_one_line(.0))]
    Candle(#[source] CandleError),
    /// The program asks for something other than the model declares, or declares what no model has.
    #[error(transparent)]
    Declaration(#[from] DeclarationError),
    /// Gradients would be lost without a trace: the loss depends on something that this backward
    /// does not reach.
    #[error(transparent)]
    LostGradients(#[from] LostGradients),
    /// A forward needs a unit again that was freed after an earlier use.
    #[error(
        "unit {unit} was freed after its use in this forward and is needed again: either it runs \
         twice, or another unit reads its parameters; mark it `keep`"
    )]
    Freed {
        /// The unit whose parameters were freed.
        unit: String,
    },
    /// A call came after the end of its pass.
    #[error(
        "{call} is refused, because its pass is over: a pass has one forward, and then one \
         `backward`, `backward_sum` or `finish`"
    )]
    PassOver {
        /// The call, with the unit if it runs one.
        call: String,
    },
    /// An op read a parameter after it was freed.
    #[error(
        "candle's {op} read a parameter whose unit is resharded: a parameter can be read only \
         inside `unit`, and a value computed from it must leave the unit as its output"
    )]
    Resharded {
        /// candle's name of the op.
        op: &'static str,
    },
}

/// A difference between the declaration of a model and its code: change one of the two.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeclarationError {
    /// The model has no unit of this name.
    #[error("the model has no unit {name}, it has {known}")]
    UnknownUnit {
        /// The name in the call.
        name: String,
        /// The names of the model's units, separated by commas.
        known: String,
    },
    /// The model has no parameter of this name.
    #[error("unit {unit} reads parameter {name}, which the model does not have")]
    UnknownParameter {
        /// The unit whose forward read the parameter.
        unit: String,
        /// The name in the call.
        name: String,
    },
    /// A forward reads a buffer as a parameter.
    #[error(
        "unit {unit} reads {name} as a parameter, and the model declares it as a buffer: read it \
         with `Parameters::buffer`"
    )]
    IsBuffer {
        /// The unit whose forward read the buffer.
        unit: String,
        /// The name in the call.
        name: String,
    },
    /// The model has no buffer of this name.
    #[error(
        "unit {unit} uses buffer {name}, which the model does not have: declare it with \
         `Unit::batch_norm`, or with `Param::buffer` or `Param::averaged_buffer`, not as a \
         parameter"
    )]
    UnknownBuffer {
        /// The unit whose forward read or wrote the buffer.
        unit: String,
        /// The name in the call.
        name: String,
    },
    /// A forward writes a buffer in another shape than the model declares.
    #[error("buffer {buffer} is written as {written:?}, and declared as {declared:?}")]
    BufferShape {
        /// The buffer.
        buffer: String,
        /// The shape in the call.
        written: Vec<usize>,
        /// The shape in the model's description.
        declared: Vec<usize>,
    },
    /// A constructor asks for a parameter in another shape than the model declares.
    #[error(
        "parameter {parameter} of unit {unit} is asked for as {asked:?}, and declared as {declared:?}"
    )]
    Shape {
        /// The parameter.
        parameter: String,
        /// The unit that holds it.
        unit: String,
        /// The shape in the call.
        asked: Vec<usize>,
        /// The shape in the model's description.
        declared: Vec<usize>,
    },
    /// A constructor asks for a parameter in another dtype than the compute dtype of the unit that
    /// holds it.
    #[error(
        "parameter {parameter} of unit {unit} is asked for as {asked:?}, and that unit computes in \
         {computed:?}: cast the activations, or set `Precision::parameters` or `Unit::compute_in`"
    )]
    Dtype {
        /// The parameter.
        parameter: String,
        /// The unit that holds it.
        unit: String,
        /// The dtype in the call.
        asked: DType,
        /// The dtype of the gathered parameters.
        computed: DType,
    },
    /// A constructor asks for a parameter on another device than the model's.
    #[error(
        "parameter {parameter} of unit {unit} is asked for on {asked:?}, and lies on {lies_on:?}"
    )]
    Device {
        /// The parameter.
        parameter: String,
        /// The unit that holds it.
        unit: String,
        /// The device in the call.
        asked: DeviceLocation,
        /// The device of the gathered parameters.
        lies_on: DeviceLocation,
    },
    /// A constructor asks for a parameter twice, with different shapes.
    #[error("parameter {parameter} is asked for as {first:?}, and later as {second:?}")]
    Reshaped {
        /// The parameter.
        parameter: String,
        /// The shape in the first call.
        first: Vec<usize>,
        /// The shape in the later call.
        second: Vec<usize>,
    },
    /// A constructor that is recorded asks for a parameter without a shape.
    #[error(
        "parameter {parameter} is asked for by `get_unchecked`, which gives no shape to record: \
         use `get`"
    )]
    NoShape {
        /// The parameter.
        parameter: String,
    },
    /// A constructor asks for state that a forward changes. The layer would change a copy of it.
    #[error(
        "{names} are buffers, not parameters: a forward in training changes them, and not by \
         gradients, and candle's layer changes a copy, which hsdp would lose; use \
         `hsdp_models::nn::batch_norm` and declare it with `Recorded::batch_norm` or \
         `Unit::batch_norm`, or declare state of your own with `Param::buffer`"
    )]
    Buffers {
        /// Names separated by commas, each with a reason if the name itself is not the reason.
        names: String,
    },
    /// `Recorded::map` changed a name or a shape, which the constructors determine.
    #[error(
        "`Recorded::map` declares parameter {parameter} as {name} of shape {shape:?}: its name and \
         its shape are those that the constructors ask for, {recorded:?}"
    )]
    Redeclared {
        /// The recorded name.
        parameter: String,
        /// The recorded shape.
        recorded: Vec<usize>,
        /// The name that `map` gave it.
        name: String,
        /// The shape that `map` gave it.
        shape: Vec<usize>,
    },
    /// No pattern takes these parameters.
    #[error("no pattern takes {parameters}: the pattern `root` takes all that others leave")]
    NoUnit {
        /// The names, separated by commas.
        parameters: String,
    },
    /// A pattern takes no parameter.
    #[error(
        "pattern {pattern} takes no parameter: either none matches it, or earlier patterns take all"
    )]
    EmptyPattern {
        /// The pattern.
        pattern: String,
    },
}

impl DeclarationError {
    /// Makes the error of a unit that the model does not have.
    pub(crate) fn unknown_unit(name: &str, units: &[Unit]) -> Self {
        let known: Vec<_> = units.iter().map(|unit| unit.name.as_str()).collect();
        Self::UnknownUnit { name: name.to_owned(), known: known.join(", ") }
    }
}

/// Gradients that would be lost, because the loss depends on something that its backward does not
/// reach, or reaches in another way: change the forward or the loss.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LostGradients {
    /// The loss of a check has no gradient for these parameters.
    #[error(
        "{} of {trainable} trainable parameters get no gradient from this loss: {listed}; likely \
         causes: {causes}; freeze those that are not trained with `Recorded::map`",
        .parameters.len()
    )]
    NoGradient {
        /// The number of trainable parameters.
        trainable: usize,
        /// The names of the parameters without a gradient, in the order of the recording.
        parameters: Vec<String>,
        /// The names by layer, with numbers and names in braces as in a shell.
        listed: String,
        /// The likely causes.
        causes: String,
    },
    /// A recomputed unit depends on something with a history other than its parameters and its
    /// input.
    #[error(
        "the output of recomputed unit {unit} depends on {what}, beside its own parameters and its \
         input: their gradients would be lost, because the backward runs its forward again with \
         these alone; run it with `unit`, give the tensor that it captures as a further input, \
         or detach that tensor"
    )]
    History {
        /// The unit.
        unit: String,
        /// Description of what the output depends on.
        what: String,
    },
    /// A tensor that left the forward of a recomputed unit, but is not its output, is used.
    #[error(
        "a tensor left recomputed unit {unit} beside its output, and {what} depends on it: its \
         gradients would be lost, because the backward runs the forward again for the gradient of \
         its output alone; return the tensor as part of the output, run the unit with `unit`, \
         or detach the tensor"
    )]
    BesideOutput {
        /// The unit that the tensor left.
        unit: String,
        /// The loss, or another recomputed unit.
        what: String,
    },
    /// A loss depends on variables of the program that are no parameters of the model.
    #[error(
        "the loss depends on {count} of the program's own variables, which are no parameters of the \
         model, so their gradients would be lost: {variables}; declare each as a `Param` of a unit \
         and read it with `get`, ask for its gradient with `Pass::gradient_of` before the backward, \
         or detach it if it is not trained"
    )]
    Undeclared {
        /// The number of these variables.
        count: usize,
        /// Their shapes and dtypes.
        variables: String,
    },
    /// The forward of a recomputed unit differed in the backward.
    #[error("recomputed unit {unit} is not repeatable: {how}")]
    NotRepeatable {
        /// The unit.
        unit: String,
        /// The difference.
        how: String,
    },
    /// A loss depends on parameters that another pass has gathered.
    #[error(
        "the loss depends on {what} through another pass than the one that runs the backward: a \
         pass reduces the gradients of its own microbatch alone; run the other model in a batch of \
         `ShardedModel::evaluation_with_backward`, in which its parameters are constants, detach the \
         output of the other pass before it enters this loss, or declare the units of both models in \
         one `ModelSpec`, frozen where they are not trained"
    )]
    OtherPass {
        /// The unit of the other pass, if it is known.
        what: String,
    },
    /// A loss depends on a batch of an evaluation that was finished before the backward.
    #[error(
        "the loss depends on unit {unit} of an evaluation whose batch was finished before this \
         backward, which needs its parameters again: finish the batch after the backward"
    )]
    BatchFinished {
        /// The unit.
        unit: String,
    },
    /// A loss depends on a batch of an evaluation that has served the backward of an earlier loss.
    #[error(
        "the loss depends on unit {unit} of an evaluation whose batch has taken part in an earlier \
         backward, after which its parameters were freed: run the other model in a batch for each \
         backward"
    )]
    BatchUsed {
        /// The unit.
        unit: String,
    },
    /// A microbatch without weight, or without a backward, has counted in the statistics of all
    /// ranks.
    #[error(
        "values of this rank count in the statistics of unit {unit}, and so in the losses of all \
         ranks, but this microbatch has the weight 0: gradients through these statistics would be \
         lost; give a rank whose items have no weight no items at all (`StepOptions::without_data`)"
    )]
    Unweighted {
        /// The unit.
        unit: String,
    },
    /// A loss does not depend on a layer in whose statistics over all ranks the batch has counted.
    #[error(
        "values of this rank count in the statistics of unit {unit}, and so in the losses of other \
         ranks, but the loss of this rank does not depend on that layer: gradients through these \
         statistics would be lost; detach the tensor that enters the layer, or add the output y of \
         the layer to the loss, as `(y.zeros_like()? * &y)?.sum_all()?` if it does not count"
    )]
    Unreached {
        /// The unit.
        unit: String,
    },
    /// A gradient came from a backward that no pass runs.
    #[error(
        "a gradient came to unit {unit} outside of the backward of its pass: call \
         Pass::backward, not Tensor::backward"
    )]
    TensorBackward {
        /// The unit.
        unit: String,
    },
}

/// Functions and layers of candle that cut the graph in any model. Parameters before them get no
/// gradient, and candle does not report it.
pub(crate) const CUTS: &str = "candle_nn's `softmax_last_dim`, `layer_norm`, `rms_norm`, `rope`, `rope_i`, `rope_thd`, \
     `sdpa` and `flash_attn` have no backward, and neither have its layers `LayerNorm` and \
     `RmsNorm` on contiguous input: `hsdp_models::nn` has such layers with gradients; candle's \
     `detach` and `arg_sort_last_dim` cut as well, and so do values that are read and made into a \
     tensor again";

/// Joins the first eight items for a message, and counts the others.
pub(crate) fn listed<T: Display>(items: impl ExactSizeIterator<Item = T>) -> String {
    const LISTED: usize = 8;
    let more = items.len().saturating_sub(LISTED);
    let mut listed = items.take(LISTED).map(|it| it.to_string()).collect::<Vec<_>>().join(", ");
    if more > 0 {
        listed += &format!(" and {more} more");
    }
    listed
}

/// Dtype of a storage whose parameter was freed. candle's ops refuse it.
pub(crate) const VACANT: DType = DType::F4;

impl From<hsdp_comm::Error> for Error {
    fn from(error: hsdp_comm::Error) -> Self {
        Self::Runtime(error.into())
    }
}

/// Converts the failure of a rank of [`hsdp::launch`] that panicked, or could not be started.
impl From<hsdp_comm::RankFailure> for Error {
    fn from(failure: hsdp_comm::RankFailure) -> Self {
        Self::Runtime(failure.into())
    }
}

impl From<hsdp_sharding::Error> for Error {
    fn from(error: hsdp_sharding::Error) -> Self {
        Self::Runtime(error.into())
    }
}

impl From<CandleError> for Error {
    fn from(error: CandleError) -> Self {
        match error {
            CandleError::WithBacktrace { inner, .. } => Self::from(*inner),
            CandleError::Io(carrier) => match carrier.downcast::<Self>() {
                Ok(ours) => ours,
                Err(carrier) => Self::Candle(CandleError::Io(carrier)),
            },
            // candle's own errors keep their context. hsdp's errors lose it, so that they stay
            // typed.
            CandleError::Context { inner, context } => match Self::from(*inner) {
                Self::Candle(inner) => {
                    Self::Candle(CandleError::Context { inner: Box::new(inner), context })
                }
                ours => ours,
            },
            CandleError::WrappedContext { wrapped, context } => of_wrapped(wrapped, context),
            CandleError::UnsupportedDTypeForOp(VACANT, op)
            | CandleError::DTypeMismatchBinaryOp { lhs: VACANT, op, .. }
            | CandleError::DTypeMismatchBinaryOp { rhs: VACANT, op, .. } => Self::Resharded { op },
            CandleError::UnexpectedDType { got: VACANT, .. } => {
                Self::Resharded { op: "copy to the host" }
            }
            error => Self::Candle(error),
        }
    }
}

impl Error {
    /// Adds the unit whose forward failed to an error of candle. The errors of hsdp name theirs.
    pub(crate) fn in_unit(self, unit: &str) -> Self {
        match self {
            Self::Candle(error) => Self::Candle(error.context(format!("unit {unit}"))),
            ours => ours,
        }
    }
}

/// Displays an error of candle, which puts each context in a line of its own.
fn in_one_line(error: &CandleError) -> String {
    match error {
        CandleError::Context { inner, context } => format!("{context}: {}", in_one_line(inner)),
        error => error.to_string(),
    }
}

/// Returns the error that candle's `Context` trait has wrapped. It wraps candle's own errors too.
fn of_wrapped(wrapped: Box<dyn std::error::Error + Send + Sync>, context: String) -> Error {
    let wrapped = match wrapped.downcast::<Error>() {
        Ok(ours) => return *ours,
        Err(wrapped) => wrapped,
    };
    match wrapped.downcast::<CandleError>().map(|candles| Error::from(*candles)) {
        Ok(Error::Candle(inner)) => {
            let wrapped = Box::new(inner);
            Error::Candle(CandleError::WrappedContext { wrapped, context })
        }
        Ok(ours) => ours,
        Err(wrapped) => Error::Candle(CandleError::WrappedContext { wrapped, context }),
    }
}

impl From<Error> for CandleError {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            // Only this variant of candle's error carries another error, displays it unchanged, and
            // returns it.
            ours => Self::Io(io::Error::other(ours)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours() -> Error {
        DeclarationError::UnknownUnit { name: "h.9".to_owned(), known: "h.0".to_owned() }.into()
    }

    #[test]
    fn an_error_comes_out_of_candle_as_it_went_in() {
        let carried = CandleError::from(ours());
        assert_eq!(carried.to_string(), ours().to_string());
        let known = Error::from(carried);
        assert!(
            matches!(known, Error::Declaration(DeclarationError::UnknownUnit { name, .. }) if name == "h.9")
        );
    }

    #[test]
    fn a_long_list_is_cut() {
        assert_eq!(listed(["bn0", "bn1"].iter()), "bn0, bn1");
        assert_eq!(listed(0..8), "0, 1, 2, 3, 4, 5, 6, 7");
        assert_eq!(listed(0..10), "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }

    #[test]
    fn an_error_of_the_planner_needs_no_conversion() {
        fn mesh() -> Result<hsdp::Mesh, Error> {
            Ok(hsdp::Mesh::new(2, 0)?)
        }
        let error = mesh().expect_err("a mesh without ranks");
        assert!(matches!(error, Error::Runtime(hsdp::Error::Plan(_))), "{error}");
    }

    #[test]
    fn an_error_comes_out_of_a_backtrace() {
        let inner = Box::new(CandleError::from(ours()));
        let backtrace = Box::new(std::backtrace::Backtrace::disabled());
        let wrapped = CandleError::WithBacktrace { inner, backtrace };
        assert!(matches!(
            Error::from(wrapped),
            Error::Declaration(DeclarationError::UnknownUnit { .. })
        ));
    }

    #[test]
    fn candles_own_errors_stay_candles() {
        let io = CandleError::Io(io::Error::other("disk"));
        assert!(matches!(Error::from(io), Error::Candle(CandleError::Io(_))));
        let mismatch = CandleError::UnsupportedDTypeForOp(DType::U8, "matmul");
        assert!(matches!(Error::from(mismatch), Error::Candle(_)));
    }
}
