//! Digests by which ranks compare what must be the same on all of them.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Of lines of text, each with its end.
pub(crate) fn of_lines(lines: &[String]) -> u64 {
    xxh3_64(lines.join("\n").as_bytes())
}

/// Of the bits of parameters, unit after unit.
pub(crate) fn of_parameters<'a>(shards: impl Iterator<Item = &'a [f32]>) -> u64 {
    let mut hasher = Xxh3::new();
    for shard in shards {
        hasher.update(bytemuck::cast_slice(shard));
    }
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_sees_the_sign_of_zero() {
        let plus = of_parameters([[0.0_f32].as_slice()].into_iter());
        let minus = of_parameters([[-0.0_f32].as_slice()].into_iter());
        assert_ne!(plus, minus);
    }

    #[test]
    fn a_digest_does_not_depend_on_how_values_are_cut() {
        let whole = of_parameters([[1.0_f32, 2.0].as_slice()].into_iter());
        let cut = of_parameters([[1.0_f32].as_slice(), [2.0].as_slice()].into_iter());
        assert_eq!(whole, cut);
    }
}
