//! The settings that programs compare between ranks before they begin.

use hsdp_sharding::Rank;

use crate::{Channel, Error, Group, SetupError, Stage, Tag, World};

/// The longest text that is compared as it is; of longer ones the first part, and a hash of all.
const MOST_BYTES: usize = 4 << 10;

/// The most bytes that are added to the first part.
const MOST_ADDED: usize = 64;

impl World {
    /// Compares a setting that all ranks must share, such as a seed or the options of a program.
    /// `what` names it, `said` is its value on this rank.
    ///
    /// **Collective**, on the control channel, before steps or between them.
    ///
    /// # Errors
    /// [`SetupError::ConfigMismatch`] on all ranks, with the values of rank 0 and of the first rank
    /// that differs from it; the errors of any collective.
    ///
    /// ```
    /// use hsdp_comm::{WorldOptions, launch};
    ///
    /// let ends = launch(3, WorldOptions::default(), |world| {
    ///     let seed = if world.rank().index() == 2 { 7 } else { 1 };
    ///     world.compare("seed", &format!("{seed}"))
    /// });
    /// for end in ends {
    ///     let error = end.expect_err("rank 2 has another seed").to_string();
    ///     assert_eq!(error, "ranks 0 and 2 differ in their seed: 1, 7");
    /// }
    /// ```
    pub fn compare(&self, what: &'static str, said: &str) -> Result<(), Error> {
        let group = self.world_group(Channel::Control);
        let said = exchanged(&group, shortened(said).as_bytes())?;
        let texts: Vec<_> = said.iter().map(|text| String::from_utf8_lossy(text)).collect();
        match texts.iter().position(|text| *text != texts[0]) {
            None => Ok(()),
            Some(other) => Err(SetupError::ConfigMismatch {
                what,
                ranks: [Rank::new(0), Rank::new(other)],
                said: [0, other].map(|rank| texts[rank].to_string()).into(),
            }
            .into()),
        }
    }
}

/// Returns the bytes of each rank, in rank order. **Collective**.
fn exchanged(group: &Group, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
    let lengths = gathered(group, vec![own.len() as u64])?;
    let longest = longest(&lengths);
    let all = gathered(group, words(own, longest))?;
    let bytes = |(rank, len): (usize, &u64)| text(&all[rank * longest..][..longest], *len);
    Ok(lengths.iter().enumerate().map(bytes).collect())
}

/// The words of the longest of these texts, and no more than those of the longest that there is.
fn longest(lengths: &[u64]) -> usize {
    let longest = lengths.iter().map(|len| usize::try_from(*len).unwrap_or(usize::MAX)).max();
    longest.unwrap_or(0).min(MOST_BYTES + MOST_ADDED).div_ceil(8)
}

/// The words that each rank brings, by rank. **Collective**.
pub(crate) fn gathered(group: &Group, values: Vec<u64>) -> Result<Vec<u64>, Error> {
    group.all_gather(Tag::new(Stage::Setup), values)?.wait()
}

fn shortened(said: &str) -> String {
    if said.len() <= MOST_BYTES {
        return said.to_owned();
    }
    let end = (0..=MOST_BYTES).rev().find(|end| said.is_char_boundary(*end)).unwrap_or(0);
    let hash = xxhash_rust::xxh3::xxh3_64(said.as_bytes());
    format!("{}... ({} bytes, hash {hash:016x})", &said[..end], said.len())
}

/// Bytes as numbers, filled up with zeros.
fn words(bytes: &[u8], count: usize) -> Vec<u64> {
    let mut words = vec![0_u64; count];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

fn text(words: &[u64], len: u64) -> Vec<u8> {
    let bytes: &[u8] = bytemuck::cast_slice(words);
    let len = usize::try_from(len).unwrap_or(0).min(bytes.len());
    bytes[..len].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{WorldOptions, launch};

    #[test]
    fn long_texts_that_differ_at_their_ends_are_told_apart() {
        let said = |rank: usize| format!("{}{rank}", "é".repeat(MOST_BYTES));
        let compare = |size, said: &(dyn Fn(usize) -> String + Sync)| {
            launch(size, WorldOptions::default(), |world| {
                world.compare("options", &said(world.rank().index()))
            })
        };
        let ends = compare(2, &said);
        assert!(ends.iter().all(|end| *end == ends[0]));
        let error = ends[0].as_ref().expect_err("they differ").to_string();
        assert!(error.contains("(8193 bytes, hash "), "{error}");
        assert_eq!(compare(2, &|_| said(3)), [Ok(()), Ok(())]);
    }

    #[test]
    fn the_length_that_a_rank_says_takes_no_memory_beyond_that_of_the_longest_text() {
        let long = shortened(&"x".repeat(usize::from(u16::MAX)));
        assert!(long.len() <= MOST_BYTES + MOST_ADDED);
        assert_eq!(longest(&[1, 9, 0]), 2);
        for len in [MOST_BYTES as u64 + 65, 1 << 40, u64::MAX] {
            assert_eq!(longest(&[3, len]), (MOST_BYTES + MOST_ADDED) / 8);
        }
        assert_eq!(text(&[0; 2], u64::MAX).len(), 16);
    }

    #[test]
    fn one_rank_and_texts_of_no_length_agree() {
        for size in [1, 3] {
            let ends = launch(size, WorldOptions::default(), |world| world.compare("nothing", ""));
            assert_eq!(ends, vec![Ok(()); size]);
        }
    }
}
