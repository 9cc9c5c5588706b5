//! Pairs of views. Each pair shows one point of a latent space through two fixed maps, with noise.

use candle_core::{DType, Device, Result, Tensor};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::options::Options;

/// Coordinates of a point.
pub(crate) const LATENT: usize = 6;

/// Numbers of a view.
pub(crate) const VIEW: usize = 24;

/// The scale of the noise on a number of a view, whose own scale is about 1.
const NOISE: f64 = 0.25;

/// The use of a stream of random numbers. Batches have the streams from `BATCHES` on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    Maps,
    Parameters,
    Batch(usize),
}

/// Random numbers that depend on the seed and the stream alone, not on the number of ranks.
pub(crate) fn numbers(seed: u64, stream: Stream) -> impl FnMut() -> f64 {
    const BATCHES: u64 = 2;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(match stream {
        Stream::Maps => 0,
        Stream::Parameters => 1,
        Stream::Batch(step) => BATCHES + step as u64,
    });
    // Of variance 1.
    move || random.random_range(-1.0..1.0) * 3.0_f64.sqrt()
}

/// A matrix of random numbers times `scale`.
pub(crate) fn matrix(
    (rows, columns): (usize, usize),
    scale: f64,
    number: &mut impl FnMut() -> f64,
) -> Result<Tensor> {
    let values: Vec<f64> = (0..rows * columns).map(|_| number() * scale).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu)
}

/// Both views of the pairs of a batch.
#[derive(Debug)]
pub(crate) struct Pairs {
    pub(crate) views: [Tensor; 2],
}

impl Pairs {
    /// The whole batch of a step: `[batch, VIEW]` each.
    pub(crate) fn whole(options: &Options, step: usize) -> Result<Self> {
        let mut of_maps = numbers(options.seed, Stream::Maps);
        let mut of_batch = numbers(options.seed, Stream::Batch(step));
        let points = matrix((options.batch, LATENT), 1.0, &mut of_batch)?;
        let mut view = || -> Result<Tensor> {
            let scale = 1.0 / (LATENT as f64).sqrt();
            let seen = points.matmul(&matrix((LATENT, VIEW), scale, &mut of_maps)?)?.tanh()?;
            let noise = matrix((options.batch, VIEW), NOISE, &mut of_batch)?;
            (seen + noise)?.to_dtype(options.dtype.dtype())
        };
        Ok(Self { views: [view()?, view()?] })
    }

    /// A rank's part of the batch of a step: `[batch / ranks, VIEW]` each.
    pub(crate) fn of_rank(options: &Options, step: usize, rank: usize) -> Result<Self> {
        let Self { views: [one, other] } = Self::whole(options, step)?;
        let (start, len) = (rank * options.share(), options.share());
        Ok(Self { views: [one.narrow(0, start, len)?, other.narrow(0, start, len)?] })
    }
}

/// The index of each of these pairs' partners among all pairs: i64, `[len, 1]`.
pub(crate) fn partners(start: usize, len: usize) -> Result<Tensor> {
    let places: Vec<i64> = (start..start + len).map(|place| place as i64).collect();
    Tensor::from_vec(places, (len, 1), &Device::Cpu)?.to_dtype(DType::I64)
}
