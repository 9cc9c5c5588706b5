//! The failure of a rank, or of training on all ranks.

use hsdp_train::Failure;

/// The reason for which training fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    /// An operation failed. A collective most often fails because another rank gave up.
    #[error("training failed: {0}")]
    Rank(#[from] hsdp_candle::Error),
    /// A rank panicked.
    #[error("training failed: {0}")]
    Panic(#[from] hsdp::RankFailure),
    /// The ranks differ from one rank with the whole batch.
    #[error("verification failed: {0}")]
    Disagreement(String),
}

impl TrainError {
    /// Whether it is most often the echo of a failure of another rank.
    pub(crate) fn is_echo(&self) -> bool {
        matches!(self, Self::Rank(hsdp_candle::Error::Runtime(hsdp::Error::Comm(_))))
    }
}

impl From<candle_core::Error> for TrainError {
    fn from(error: candle_core::Error) -> Self {
        hsdp_candle::Error::from(error).into()
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        Self::work(error)
    }
}
