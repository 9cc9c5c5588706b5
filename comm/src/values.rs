//! Small values of the user, which ranks add up, average or hand out.

use hsdp_sharding::Rank;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{CallError, Channel, Error, Op, Tag, World};

/// The most bytes of a value that [`World::broadcast`] hands out.
const MOST_BYTES: usize = 1 << 20;

/// The length that stands for a value that cannot be written as bytes.
const NO_BYTES: u64 = u64::MAX;

/// # Small values
///
/// All are **collective** over the world, on [`Channel::Control`], and wait at most for its
/// [deadline](Self::deadline). All ranks call them in the same order: ranks compare only the kind
/// of a call, so two calls of one kind that are swapped on a rank are mixed. A collective of a
/// [`Group`](crate::Group) can carry a [`Tag`], which ranks compare.
impl World {
    /// The sum of the values of all ranks, added in rank order in f64: the same bits on all ranks.
    /// Collective.
    ///
    /// ```
    /// use hsdp_comm::{World, WorldOptions, launch};
    ///
    /// let sum = |world: World| world.sum(world.rank().index() as f64);
    /// let sums = launch(3, WorldOptions::default(), sum);
    /// assert!(sums.into_iter().all(|sum| sum == Ok(3.0)));
    /// ```
    ///
    /// # Errors
    /// Errors of [`Group::all_gather`](crate::Group::all_gather), and of its wait.
    pub fn sum(&self, value: f64) -> Result<f64, Error> {
        let group = self.world_group(Channel::Control);
        let values = group.all_gather(Tag::default(), vec![value])?.wait()?;
        Ok(values.into_iter().sum())
    }

    /// The mean of the values of all ranks: their [sum](Self::sum) over the number of ranks.
    /// Collective.
    ///
    /// ```
    /// use hsdp_comm::{World, WorldOptions, launch};
    ///
    /// let mean = |world: World| world.mean(world.rank().index() as f64);
    /// let means = launch(4, WorldOptions::default(), mean);
    /// assert!(means.into_iter().all(|mean| mean == Ok(1.5)));
    /// ```
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    #[expect(clippy::cast_precision_loss, reason = "a world has few ranks")]
    pub fn mean(&self, value: f64) -> Result<f64, Error> {
        Ok(self.sum(value)? / self.size() as f64)
    }

    /// The value of the rank `from`, on all ranks; the values of the others are ignored. It goes as
    /// bytes in postcard's format, at most 1 MiB. Collective.
    ///
    /// ```
    /// use hsdp_comm::{WorldOptions, launch};
    /// use hsdp_sharding::Rank;
    ///
    /// let seeds = launch(3, WorldOptions::default(), |world| {
    ///     let read = (world.rank() == Rank::new(1)).then(|| "seed 7".to_owned()); // on rank 1 alone
    ///     world.broadcast(read, Rank::new(1))
    /// });
    /// assert!(seeds.into_iter().all(|seed| seed == Ok(Some("seed 7".to_owned()))));
    /// ```
    ///
    /// # Errors
    /// [`CallError::BadRank`] if the world has no rank `from`; [`CallError::Refused`] on all ranks
    /// if its value has more bytes or cannot be written as bytes, and on a rank that cannot read it
    /// as a `T`; those of [`Group::broadcast`](crate::Group::broadcast), and of its wait.
    pub fn broadcast<T: Serialize + DeserializeOwned>(
        &self,
        value: T,
        from: Rank,
    ) -> Result<T, Error> {
        let rank = self.rank();
        let size = self.size();
        if from.index() >= size {
            return Err(CallError::BadRank { rank: from, size }.into());
        }
        let bytes = (rank == from).then(|| postcard::to_allocvec(&value).ok()).flatten();
        let len = self
            .words_of(from, vec![bytes.as_ref().map_or(NO_BYTES, |bytes| bytes.len() as u64)])?[0];
        let len = self.checked_len(from, len)?;
        let mut words = vec![0; len.div_ceil(size_of::<u64>())];
        if let Some(bytes) = &bytes {
            bytemuck::cast_slice_mut(&mut words)[..len].copy_from_slice(bytes);
        }
        let words = self.words_of(from, words)?;
        let other =
            |why: String| self.refused(format!("the value of rank {from} has another type: {why}"));
        match postcard::take_from_bytes(&bytemuck::cast_slice(&words)[..len]) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(other(format!("{} bytes are left over", rest.len()))),
            Err(error) => Err(other(error.to_string())),
        }
    }

    fn words_of(&self, from: Rank, words: Vec<u64>) -> Result<Vec<u64>, Error> {
        self.world_group(Channel::Control).broadcast(Tag::default(), from.index(), words)?.wait()
    }

    /// The length of a value, which all ranks know.
    fn checked_len(&self, from: Rank, len: u64) -> Result<usize, Error> {
        match usize::try_from(len) {
            _ if len == NO_BYTES => {
                Err(self.refused(format!("the value of rank {from} cannot be written as bytes")))
            }
            Ok(len) if len <= MOST_BYTES => Ok(len),
            _ => Err(self.refused(format!(
                "the value of rank {from} has {len} bytes, at most {MOST_BYTES} go: hand out a name of it, such as that of a file"
            ))),
        }
    }

    fn refused(&self, problem: String) -> Error {
        CallError::Refused { op: Op::Broadcast, rank: self.rank(), problem }.into()
    }
}
