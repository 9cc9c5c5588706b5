//! A rank of a test, and the helpers that tests share.

use candle_core::{DType, Device, Tensor, Var};
use hsdp::collective::Collective;
use hsdp::dist::{
    Applied, Axes, Carrier as _, CarrierCall, Invariant, OnShard, Partial, Recording, Replicate,
    Varying,
};
use hsdp::{World, WorldOptions};
use hsdp_candle::Error;
use hsdp_candle::distributed::{Candle, Dist, Tape};
use hsdp_comm::Channel;

/// A value of each rank's own.
pub(crate) type Own = Dist<Invariant, Varying>;

/// A rank on a tape over the whole world, which is the shard axis.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) rank: usize,
    pub(crate) tape: Tape,
    pub(crate) dtype: DType,
}

impl Member {
    pub(crate) fn new(world: &World, dtype: DType) -> Result<Self, Error> {
        let tape = Tape::of_group(world, world.world_group(Channel::User))?;
        Ok(Self { rank: world.rank().index(), tape, dtype })
    }

    /// This rank's number, from 1.
    pub(crate) fn place(&self) -> f64 {
        self.rank as f64 + 1.0
    }

    pub(crate) fn tensor(&self, values: &[f64]) -> Result<Tensor, Error> {
        Ok(Tensor::new(values, &Device::Cpu)?.to_dtype(self.dtype)?)
    }

    /// A variable, so that candle computes its gradient.
    pub(crate) fn variable(&self, values: &[f64]) -> Result<Tensor, Error> {
        Ok(Var::from_tensor(&self.tensor(values)?)?.as_tensor().clone())
    }

    pub(crate) fn varying(&self, tensor: Tensor) -> Own {
        self.tape.assume(tensor)
    }

    /// Applies a collective over the whole world to a tensor, as the first one of a tape.
    pub(crate) fn apply(
        &self,
        collective: &Collective,
        input: &Tensor,
        record: Recording,
    ) -> Result<Applied<Tensor>, Error> {
        let group = self.tape.group(Axes::Shard);
        Candle::apply(&CarrierCall { collective, input, group, after: None, record })
    }
}

/// Values that become terms of one sum.
pub(crate) trait AsTerms {
    fn as_terms(&self) -> Result<Dist<Invariant, Partial>, Error>;
}

impl AsTerms for Dist<Invariant, Replicate> {
    fn as_terms(&self) -> Result<Dist<Invariant, Partial>, Error> {
        self.to_varying(OnShard)?.as_terms()
    }
}

impl AsTerms for Own {
    fn as_terms(&self) -> Result<Dist<Invariant, Partial>, Error> {
        self.to_partial(OnShard)
    }
}

/// Runs `work` on `size` ranks; all must succeed.
pub(crate) fn ranks<O: Send>(
    size: usize,
    work: impl Fn(World) -> Result<O, Error> + Sync,
) -> Vec<O> {
    let outcomes = hsdp::launch(size, WorldOptions::default(), work);
    outcomes.into_iter().map(|outcome| outcome.expect("a rank failed")).collect()
}

/// The elements in f64, in row-major order.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f64>, Error> {
    Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

/// Asserts that the numbers are equal, with NaN where NaN is expected.
pub(crate) fn assert_same(got: &[f64], want: &[f64], what: &str) {
    let same = |(got, want): (&f64, &f64)| got == want || (got.is_nan() && want.is_nan());
    let all = got.len() == want.len() && got.iter().zip(want).all(same);
    assert!(all, "{what}: got {got:?}, want {want:?}");
}

/// Asserts that the numbers differ by at most `bound`, relative to the largest.
pub(crate) fn assert_close(got: &[f64], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
    for (got, want) in got.iter().zip(want) {
        let apart = (got - want).abs();
        assert!(apart <= bound * largest, "got {got}, want {want}, {apart:e} apart of {largest}");
    }
}
