//! Digests of values that must be the same on all ranks.

use hsdp_kernels::Wire;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Number of elements that are rounded at a time.
const BLOCK: usize = 1024;

/// Returns the digest of lines of text.
pub(crate) fn of_lines(lines: &[String]) -> u64 {
    xxh3_64(lines.join("\n").as_bytes())
}

/// Returns the digest of a text.
pub(crate) fn of_text(text: &str) -> u64 {
    xxh3_64(text.as_bytes())
}

/// Returns the digest of words.
pub(crate) fn of_words<const N: usize>(words: [u64; N]) -> u64 {
    xxh3_64(bytemuck::cast_slice(&words.map(u64::to_le)))
}

/// Returns the digest of numbers, of this rank alone or of ranks with the same order of bytes.
pub(crate) fn of_numbers(numbers: &[u16]) -> u64 {
    xxh3_64(bytemuck::cast_slice(numbers))
}

/// Returns the digest of the bits of values, each rounded to a dtype.
pub(crate) fn of_rounded(values: &[f32], dtype: Wire) -> u64 {
    if dtype == Wire::F32 {
        return xxh3_64(bytemuck::cast_slice(values));
    }
    let mut hasher = Xxh3::new();
    let mut block = [0.0; BLOCK];
    for values in values.chunks(BLOCK) {
        let block = &mut block[..values.len()];
        block.iter_mut().zip(values).for_each(|(rounded, value)| *rounded = dtype.round(*value));
        hasher.update(bytemuck::cast_slice(block));
    }
    hasher.digest()
}

/// Returns the digest of the bits of parameters, unit after unit, or the first error in `shards`.
pub(crate) fn of_parameters<P: AsRef<Vec<f32>>, E>(
    shards: impl Iterator<Item = Result<P, E>>,
) -> Result<u64, E> {
    let mut hasher = Xxh3::new();
    for shard in shards {
        hasher.update(bytemuck::cast_slice(shard?.as_ref()));
    }
    Ok(hasher.digest())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn digest<const N: usize>(shards: [Vec<f32>; N]) -> u64 {
        let Ok(digest) = of_parameters(shards.into_iter().map(Ok::<_, Infallible>));
        digest
    }

    #[test]
    fn a_digest_sees_the_sign_of_zero() {
        assert_ne!(digest([vec![0.0]]), digest([vec![-0.0]]));
    }

    #[test]
    fn a_digest_does_not_depend_on_how_values_are_cut() {
        assert_eq!(digest([vec![1.0, 2.0]]), digest([vec![1.0], vec![2.0]]));
    }
}
