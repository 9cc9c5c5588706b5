//! Lists of ranks in words.

use hsdp_sharding::Rank;

/// The most ranges that are shown.
const SHOWN: usize = 16;

/// `rank 4`, `ranks 0-3, 5`: in their order, consecutive ones as a range. After sixteen ranges the others are counted.
pub(super) fn listed(ranks: &[Rank]) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", ranges(ranks))
}

/// As [`listed`], without the word.
pub(super) fn ranges(ranks: &[Rank]) -> String {
    let runs = ranks.chunk_by(|one, next| one.get().checked_add(1) == Some(next.get()));
    let (mut texts, mut left) = (Vec::new(), ranks.len());
    for run in runs.take(SHOWN) {
        left -= run.len();
        texts.push(match run {
            [first, .., last] => format!("{first}-{last}"),
            single => single.iter().map(Rank::to_string).collect(),
        });
    }
    let more = if left == 0 { String::new() } else { format!(" and {left} more") };
    texts.join(", ") + &more
}

#[cfg(test)]
mod tests {
    use hsdp_sharding::Rank;

    use super::listed;

    fn of(ranks: impl IntoIterator<Item = usize>) -> String {
        listed(&ranks.into_iter().map(Rank::new).collect::<Vec<_>>())
    }

    #[test]
    fn consecutive_ranks_are_a_range_and_many_ranges_are_counted() {
        assert_eq!(of([4]), "rank 4");
        assert_eq!(of([0, 1, 2, 3, 5]), "ranks 0-3, 5");
        assert_eq!(of(0..10_000), "ranks 0-9999");
        assert_eq!(of([3, 1, 2]), "ranks 3, 1-2");
        let some = "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30";
        assert_eq!(of((0..100).map(|rank| 2 * rank)), format!("{some} and 84 more"));
    }
}
