//! The interim record, which ranks exchange between the last reduce-scatter and the all-reduces where an overflow is expected.
//! PROTOCOL.md, "Non-finite values".

use hsdp_sharding::Rank;
use hsdp_sharding::step::Exchange;

use crate::agree::non_finite;
use crate::state::sighting::Sighting;

const WORDS: usize = Exchange::INTERIM;

/// The interim record of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interim {
    /// The number of all-reduces that the rank has issued.
    pub(crate) all_reduces: usize,
    /// The first element of its partials that is not finite.
    pub(crate) sighting: Option<Sighting>,
}

/// An overflow on some rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overflow {
    /// The largest number of all-reduces that a rank has issued. Every rank issues this many.
    pub(crate) all_reduces: usize,
    /// The first sighting, and the rank that made it.
    pub(crate) found: (Rank, Sighting),
}

impl Interim {
    pub(crate) fn encode(self) -> [u64; WORDS] {
        let [when, parameter, from] = Sighting::encode(self.sighting);
        [self.all_reduces as u64, when, parameter, from]
    }

    fn decode(words: &[u64]) -> Self {
        let all_reduces = usize::try_from(words[0]).unwrap_or(usize::MAX);
        Self { all_reduces, sighting: Sighting::decode(&words[1..]) }
    }

    /// Combines the records of all ranks; `None` if all values are finite so far.
    pub(crate) fn overflow(gathered: &[u64]) -> Option<Overflow> {
        let said = || gathered.chunks_exact(WORDS).map(Self::decode);
        let found = non_finite::first(said().map(|interim| interim.sighting))?;
        let all_reduces = said().map(|interim| interim.all_reduces).max().unwrap_or(0);
        Some(Overflow { all_reduces, found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::sighting::When;

    #[test]
    fn an_overflow_on_one_rank_is_one_of_all() {
        let sighting = Sighting { when: When::Microbatch(2), parameter: 1, from: Some(3) };
        let said = |sighting, all_reduces| Interim { all_reduces, sighting }.encode();
        let all = [said(None, 4), said(Some(sighting), 2), said(None, 3)].concat();
        let found = (Rank::new(1), sighting);
        assert_eq!(Interim::overflow(&all), Some(Overflow { all_reduces: 4, found }));
        assert_eq!(Interim::overflow(&[said(None, 4), said(None, 2)].concat()), None);
    }
}
