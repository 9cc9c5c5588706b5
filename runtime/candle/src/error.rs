//! What can go wrong between hsdp and candle, and how it travels through candle's own errors.

use std::io;

use candle_core::{DType, Error as CandleError};

/// An error of the adapter, of the runtime below it, or of candle.
///
/// Custom ops can only return candle's errors. One of ours goes into such an error whole, and comes
/// out of it again: `?` converts in both directions, and what the runtime said stays typed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The runtime failed: a collective, a step that ended early, a call out of turn.
    #[error(transparent)]
    Runtime(#[from] hsdp::Error),
    /// candle failed.
    #[error(transparent)]
    Candle(CandleError),
    /// The model has no unit of this name.
    #[error("the model has no unit {name}, it has {known}")]
    UnknownUnit {
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// The model has no parameter of this name.
    #[error("unit {unit} reads parameter {name}, which the model does not have")]
    UnknownParameter {
        /// The unit whose forward asked.
        unit: String,
        /// The name that it asked for.
        name: String,
    },
    /// A forward needs a unit again that was freed after an earlier use.
    #[error(
        "unit {unit} was freed after its use in this forward, and is needed again, by another run \
         or by another unit that reads its parameters: mark it `keep`"
    )]
    Freed {
        /// The unit.
        unit: String,
    },
    /// An op read a parameter after it was freed.
    #[error(
        "candle's {op} read a parameter whose unit is resharded: a parameter can be read inside \
         `Pass::unit` only, and what is computed from it leaves the unit as its output"
    )]
    Resharded {
        /// The op, as candle calls it.
        op: &'static str,
    },
}

/// The dtype of a storage from which a parameter was taken out: one that no op of candle accepts.
pub(crate) const VACANT: DType = DType::F4;

impl From<hsdp_comm::Error> for Error {
    fn from(error: hsdp_comm::Error) -> Self {
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

impl From<Error> for CandleError {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            // The one variant of candle's error that carries another error, shows it as it is, and
            // gives it back.
            ours => Self::Io(io::Error::other(ours)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours() -> Error {
        Error::UnknownUnit { name: "h.9".to_owned(), known: "h.0".to_owned() }
    }

    #[test]
    fn an_error_comes_out_of_candle_as_it_went_in() {
        let carried = CandleError::from(ours());
        assert_eq!(carried.to_string(), ours().to_string());
        assert!(matches!(Error::from(carried), Error::UnknownUnit { name, .. } if name == "h.9"));
    }

    #[test]
    fn an_error_comes_out_of_a_backtrace() {
        let inner = Box::new(CandleError::from(ours()));
        let backtrace = Box::new(std::backtrace::Backtrace::disabled());
        let wrapped = CandleError::WithBacktrace { inner, backtrace };
        assert!(matches!(Error::from(wrapped), Error::UnknownUnit { .. }));
    }

    #[test]
    fn candles_own_errors_stay_candles() {
        let io = CandleError::Io(io::Error::other("disk"));
        assert!(matches!(Error::from(io), Error::Candle(CandleError::Io(_))));
        let mismatch = CandleError::UnsupportedDTypeForOp(DType::U8, "matmul");
        assert!(matches!(Error::from(mismatch), Error::Candle(_)));
    }
}
