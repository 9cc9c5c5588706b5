//! The towers, and the loss over all ranks' pairs.

use candle_core::{D, DType, Var};
use hsdp::dist::{Invariant, OnShard, Replicate, Varying};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Dist, Functions as _, Pairs as _};

use super::data::{Stream, VIEW, matrix, numbers};
use super::options::Options;

/// A value that all ranks hold, and each uses in its own way. The ranks are the shard axis; the replicate axis has size 1.
pub(crate) type Copied = Dist<Invariant, Replicate>;

/// A value of which each rank has its own.
pub(crate) type Own = Dist<Invariant, Varying>;

/// Numbers of an embedding.
pub(crate) const EMBEDDING: usize = 16;

/// Similarities are divided by this before they are compared.
pub(crate) const TEMPERATURE: f64 = 0.1;

/// Two matrices for each of two towers.
#[derive(Debug)]
pub(crate) struct Parameters(pub(crate) [Var; 4]);

impl Parameters {
    /// The initial parameters, the same on all ranks.
    pub(crate) fn new(options: &Options) -> candle_core::Result<Self> {
        let mut number = numbers(options.seed, Stream::Parameters);
        let mut parameter = |rows: usize, columns: usize| {
            let values = matrix((rows, columns), 1.0 / (rows as f64).sqrt(), &mut number)?;
            Var::from_tensor(&values.to_dtype(options.dtype.dtype())?)
        };
        let width = options.width;
        Ok(Self([
            parameter(VIEW, width)?,
            parameter(width, EMBEDDING)?,
            parameter(VIEW, width)?,
            parameter(width, EMBEDDING)?,
        ]))
    }
}

/// Embeddings of length 1.
pub(crate) fn tower(view: &Own, [hidden, embed]: [&Copied; 2]) -> Result<Own, Error> {
    let y = view.matmul(hidden)?.gelu()?.matmul(embed)?;
    y.broadcast_div(&y.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)
}

/// The sum of the losses of this rank's pairs, and the number of those that find their partner.
#[derive(Debug)]
pub(crate) struct Contrast {
    pub(crate) loss: Own,
    pub(crate) found: Own,
}

impl Contrast {
    /// Compares each of `mine` with those of all ranks, to find its partner. `places` has the partners' indices. Collective.
    pub(crate) fn new(mine: &Own, others: &Own, places: &Own) -> Result<Self, Error> {
        let all: Copied = others.all_gather(OnShard)?;
        let logits = mine.matmul(&all.transpose(0, 1)?)?.scale(1.0 / TEMPERATURE)?;
        let loss = logits.log_softmax(1)?.gather_along(places, 1)?.sum_all()?.neg()?;
        let found = logits.zip(places, |logits, places| {
            let nearest = logits.argmax_keepdim(1)?.to_dtype(DType::I64)?;
            Ok(nearest.eq(places)?.to_dtype(DType::I64)?.sum_all()?)
        })?;
        Ok(Self { loss, found })
    }
}
